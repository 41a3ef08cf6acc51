"""Who may ask for what: API keys, kept as hashes, with a tenant, a priority and rates each.

Knows keys and their files. Does not know routes: the app says which right a route wants.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from skippy_sched.clock import Clock, MonotonicClock
from skippy_sched.config import Section, ServerSection
from skippy_sched.errors import ConfigError
from skippy_sched.server.problems import Forbidden, RateLimited, Unauthorized
from skippy_sched.server.wire import Request

HASH = "sha256:"
_HASH_FORM = re.compile(HASH + "[0-9a-f]{64}", re.ASCII)
#: As in requests.
PRIORITY_MIN, PRIORITY_MAX = -100, 100
#: One SHA-256 protects a key that is long and random; a short one could be found by trying.
KEY_CHARS_MIN = 20


def hash_key(key: str) -> str:
    """What configuration and keys files hold in place of a key."""
    return HASH + hashlib.sha256(key.encode()).hexdigest()


class KeyRules(Section):
    """A key's table in the keys file; the table's name is the key's."""

    hash: Annotated[str, Field(pattern=_HASH_FORM.pattern)]
    tenant: Annotated[str, Field(min_length=1)] | None = None  # None: the key's name
    priority: Annotated[int, Field(ge=PRIORITY_MIN, le=PRIORITY_MAX)] = 0
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None


class Allowance:
    """So much a minute: unused parts add up to one minute's worth; a debt is paid off by time."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._left = float(per_minute)
        self._at = now

    def wait_s(self, amount: int, now: float) -> float:
        """Seconds until so much is there; 0 when it is."""
        self._refill(now)
        return max(0.0, (amount - self._left) * 60 / self.per_minute)

    def take(self, amount: int, now: float) -> None:
        self._refill(now)
        self._left -= amount

    def _refill(self, now: float) -> None:
        earned = (now - self._at) * self.per_minute / 60
        self._left = min(self._left + earned, float(self.per_minute))
        self._at = now


@dataclass(slots=True)
class Key:
    """One client's key. ``rules`` None: it was given by its hash alone and has no bounds."""

    digest: bytes
    name: str = ""
    rules: KeyRules | None = None
    requests: Allowance | None = None
    tokens: Allowance | None = None

    def admit(self, request: Request, now: float) -> Request:
        """The request under this key's tenant and priority; raises RateLimited or Forbidden.

        A key with rules can't ask for more than its priority, so that it is worth something; of
        a service tier it gets what it may have, as the answer says.
        """
        rules = self.rules
        if rules is None:
            return request
        if request.priority is not None and request.priority > rules.priority:
            raise Forbidden(
                f"this key's requests have at most priority {rules.priority}, found "
                f"{request.priority}; ask for less, or leave it out",
                param="priority",
            )
        self._check_rates(now)
        changes: dict[str, object] = {"user": rules.tenant or self.name}
        if request.priority is None:
            is_flex = request.service_tier == "flex"
            changes["priority"] = max(rules.priority - is_flex, PRIORITY_MIN)
        if request.service_tier == "priority" and rules.priority < 1:
            changes["service_tier"] = "default"
        return request.model_copy(update=changes)

    def _check_rates(self, now: float) -> None:
        if self.requests is not None and (wait_s := self.requests.wait_s(1, now)):
            raise RateLimited(
                f"this key has {self.requests.per_minute} requests a minute; "
                f"the next one in {wait_s:.1f} s",
                retry_after_s=wait_s,
            )
        if self.tokens is not None and (wait_s := self.tokens.wait_s(1, now)):
            raise RateLimited(
                f"this key has {self.tokens.per_minute} tokens a minute, of prompts and answers, "
                f"and has used them; it may go on in {wait_s:.1f} s",
                retry_after_s=wait_s,
            )
        if self.requests is not None:
            self.requests.take(1, now)

    def charge(self, tokens: int, now: float) -> None:
        """Take what was used; what is not there becomes a debt, as answers have no known length."""
        if self.tokens is not None:
            self.tokens.take(tokens, now)


class Keyring:
    """All keys of a daemon, and the rights that they give.

    Without any keys everything is open, and the admin routes only to this machine.
    """

    def __init__(self, section: ServerSection, clock: Clock | None = None) -> None:
        """Reads the keys file, blocking; raises ConfigError."""
        self.clock = clock or MonotonicClock()
        self._users: list[Key] = []
        self._admins: list[Key] = []
        self.load(section)

    def load(self, section: ServerSection) -> None:
        """Take other keys from now on; raises ConfigError, and then nothing has changed.

        Allowances of keys whose rates are the same go on.
        """
        users = [Key(_digest(key.get_secret_value())) for key in section.api_keys]
        if section.keys_file is not None:
            users += self._read(Path(section.keys_file).expanduser())
        admins = [Key(_digest(key.get_secret_value())) for key in section.admin_keys]
        old = {key.digest: key for key in self._users}
        for key in users:
            before = old.get(key.digest)
            if before is not None and _same_rates(before, key):
                key.requests, key.tokens = before.requests, before.tokens
        self._users, self._admins = users, admins

    @property
    def is_open(self) -> bool:
        """Whether anybody may generate."""
        return not self._users

    def user(self, authorization: str | None) -> Key | None:
        """Whose request it is; None where no key is needed. Raises Unauthorized or Forbidden."""
        if self.is_open:
            return None
        digest = _offered(authorization)
        if (key := _find(self._users, digest)) is not None:
            return key
        if _find(self._admins, digest) is not None:
            raise Forbidden("this is an admin key, which is for /admin only; send an API key")
        raise Unauthorized("the API key is not one of this server's keys")

    def check_admin(self, authorization: str | None, *, is_local: bool) -> None:
        """Raises Unauthorized or Forbidden."""
        if not self._admins:
            if not self.is_open:
                self.user(authorization)
                raise Forbidden("no key has this right; set server.admin_keys")
            if not is_local:
                raise Forbidden("without keys only this machine may ask; set server.admin_keys")
            return
        digest = _offered(authorization)
        if _find(self._admins, digest) is not None:
            return
        if _find(self._users, digest) is not None:
            raise Forbidden("this key has not this right; send one of server.admin_keys")
        raise Unauthorized("the key is not one of this server's admin keys")

    def _read(self, path: Path) -> list[Key]:
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"server.keys_file: cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{path}: not valid TOML: {error}") from None
        keys: list[Key] = []
        problems = []
        now = self.clock.now()
        for name, table in tables.items():
            try:
                rules = KeyRules.model_validate(table)
            except ValidationError as error:
                problems += [
                    f"{path}: {name}: {'.'.join(map(str, problem['loc']))}: {problem['msg']}"
                    for problem in error.errors(include_url=False, include_input=False)
                ]
                continue
            key = Key(bytes.fromhex(rules.hash.removeprefix(HASH)), name, rules)
            if rules.requests_per_minute is not None:
                key.requests = Allowance(rules.requests_per_minute, now)
            if rules.tokens_per_minute is not None:
                key.tokens = Allowance(rules.tokens_per_minute, now)
            keys.append(key)
        if len({key.digest for key in keys}) < len(keys):
            problems.append(f"{path}: two keys have the same hash")
        if problems:
            raise ConfigError("\n".join(problems))
        return keys


def _same_rates(one: Key, other: Key) -> bool:
    return [a and a.per_minute for a in (one.requests, one.tokens)] == [
        a and a.per_minute for a in (other.requests, other.tokens)
    ]


def _digest(key: str) -> bytes:
    """Of a key, or of one that is hashed already."""
    text = key if _HASH_FORM.fullmatch(key) else hash_key(key)
    return bytes.fromhex(text.removeprefix(HASH))


def _offered(authorization: str | None) -> bytes:
    scheme, _, sent = (authorization or "").partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthorized("an API key is needed: send Authorization: Bearer <key>")
    # Never as a hash: who has read the file must not get in with what is written there.
    return hashlib.sha256(sent.strip().encode("latin-1")).digest()


def _find(keys: list[Key], digest: bytes) -> Key | None:
    """All are compared, so that the time tells nothing of them."""
    found = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def check_strength(key: str) -> None:
    """Raises ConfigError for a key that could be guessed."""
    if len(key) < KEY_CHARS_MIN:
        raise ConfigError(
            f"the key has {len(key)} characters, fewer than {KEY_CHARS_MIN}: it could be guessed; "
            "make one with --generate"
        )
