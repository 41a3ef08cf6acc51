"""Keys: who may do what, under which tenant and priority, and how much of it a minute."""

from __future__ import annotations

from pathlib import Path

import pytest

from skippy_sched.clock import VirtualClock
from skippy_sched.config import ServerSection
from skippy_sched.errors import ConfigError
from skippy_sched.server.keys import Keyring, hash_key
from skippy_sched.server.problems import Forbidden, RateLimited, Unauthorized
from skippy_sched.server.wire import CompletionRequest

USER, OTHER, ADMIN = (f"sk-{name}-of-a-good-length" for name in ("user", "other", "admin"))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def keys_file(tmp_path: Path):
    """Writes a keys file with one key, ``USER``, under these rules."""

    def write(rules: str = "", key: str = USER) -> str:
        path = tmp_path / "keys.toml"
        path.write_text(f'[alice]\nhash = "{hash_key(key)}"\n{rules}\n')
        return str(path)

    return write


@pytest.fixture
def keyring(keys_file):
    """A keyring whose clock stands still, and its one key."""

    def make(rules: str):
        clock = VirtualClock()
        ring = Keyring(ServerSection(keys_file=keys_file(rules)), clock)
        key = ring.user(f"Bearer {USER}")
        assert key is not None
        return clock, key

    return make


def a_request(**fields) -> CompletionRequest:
    return CompletionRequest(prompt=["x"], **fields)


async def test_a_hash_in_the_configuration_stands_for_its_key(serving):
    async with serving(server={"api_keys": [hash_key(USER)]}) as client:
        assert (await client.get("/v1/models", **bearer(USER))).status == 200
        for wrong in (OTHER, hash_key(USER), ""):
            assert (await client.get("/v1/models", **bearer(wrong))).status == 401


async def test_admin_and_api_keys_open_only_what_they_are_for(serving):
    async with serving(server={"api_keys": [USER], "admin_keys": [hash_key(ADMIN)]}) as client:
        assert (await client.get("/admin/requests", **bearer(ADMIN))).status == 200
        assert (await client.get("/v1/models", **bearer(USER))).status == 200
        for path, key in (("/admin/requests", USER), ("/admin/live", USER), ("/v1/models", ADMIN)):
            refused = await client.get(path, **bearer(key))
            assert refused.status == 403
            assert refused.error["type"] == "permission_error"
        for path in ("/admin/requests", "/v1/models"):
            assert (await client.get(path, **bearer(OTHER))).status == 401
            assert (await client.get(path)).status == 401


async def test_with_api_keys_alone_nobody_is_admin(serving):
    async with serving(server={"api_keys": [USER]}) as client:
        refused = await client.get("/admin/requests", **bearer(USER))
        assert refused.status == 403
        assert "server.admin_keys" in refused.error["message"]


def test_without_keys_only_this_machine_is_admin() -> None:
    ring = Keyring(ServerSection())
    assert ring.user(None) is None
    ring.check_admin(None, is_local=True)
    with pytest.raises(Forbidden, match="admin_keys"):
        ring.check_admin(None, is_local=False)


async def test_a_keys_requests_run_under_its_tenant_and_priority(serving, keys_file):
    path = keys_file('tenant = "team"\npriority = 3')
    async with serving(server={"keys_file": path}) as client:

        async def told(**fields) -> dict:
            done = await client.post(
                "/v1/completions", {"prompt": "x", "max_tokens": 1, **fields}, **bearer(USER)
            )
            assert done.status == 200
            found = client.engine.requests.explain(done.json["id"])
            return {"tenant": found.tenant, "priority": found.priority}

        assert await told(user="somebody") == {"tenant": "team", "priority": 3}
        assert await told(priority=-5) == {"tenant": "team", "priority": -5}
        assert await told(service_tier="flex") == {"tenant": "team", "priority": 2}
        refused = await client.post(
            "/v1/completions", {"prompt": "x", "priority": 4}, **bearer(USER)
        )
        assert refused.status == 403
        assert refused.error["param"] == "priority"


def test_a_tier_above_the_keys_priority_is_not_given_and_the_answer_says_so(keyring) -> None:
    _, key = keyring("")
    admitted = key.admit(a_request(service_tier="priority"), 0.0)
    assert admitted.priority_class == 0
    assert admitted.tier_used == "default"


def test_requests_beyond_the_rate_are_told_exactly_when_to_come_back(keyring) -> None:
    clock, key = keyring("requests_per_minute = 6")
    for _ in range(6):
        key.admit(a_request(), clock.now())
    clock.advance_to(4.0)
    with pytest.raises(RateLimited) as refused:
        key.admit(a_request(), clock.now())
    assert refused.value.retry_after_s == pytest.approx(6.0)
    clock.advance_to(10.0)
    key.admit(a_request(), clock.now())
    clock.advance_to(10_000.0)
    for _ in range(6):
        key.admit(a_request(), clock.now())
    with pytest.raises(RateLimited):
        key.admit(a_request(), clock.now())


def test_a_debt_of_tokens_is_paid_off_by_time(keyring) -> None:
    clock, key = keyring("tokens_per_minute = 600")
    key.admit(a_request(), clock.now())
    key.charge(1199, clock.now())
    with pytest.raises(RateLimited) as refused:
        key.admit(a_request(), clock.now())
    assert refused.value.retry_after_s == pytest.approx(60.0)
    clock.advance_to(60.0)
    key.admit(a_request(), clock.now())


async def test_prompts_and_answers_count_also_when_streamed(serving, keys_file):
    path = keys_file("tokens_per_minute = 30")
    for stream in (False, True):
        async with serving(server={"keys_file": path}) as client:
            body = {"prompt": [1] * 15, "max_tokens": 40, "ignore_eos": True, "stream": stream}
            done = await client.post("/v1/completions", body, **bearer(USER))
            assert done.status == 200
            refused = await client.post("/v1/completions", body, **bearer(USER))
            assert refused.status == 429
            assert refused.error["code"] == "rate_limit_exceeded"
            assert refused.headers["x-should-retry"] == "true"
            # 55 used of 30, and one more: 26 tokens at half a token a second.
            assert refused.headers["retry-after"] == "52"


def test_loading_keys_again_keeps_what_was_used_of_a_rate(keys_file) -> None:
    section = ServerSection(keys_file=keys_file("requests_per_minute = 1"))
    ring = Keyring(section, VirtualClock())

    def admit() -> None:
        key = ring.user(f"Bearer {USER}")
        assert key is not None
        key.admit(a_request(), 0.0)

    admit()
    ring.load(section)
    with pytest.raises(RateLimited):
        admit()
    keys_file("requests_per_minute = 2")
    ring.load(section)
    admit()


def test_a_wrong_keys_file_changes_nothing_and_says_what_is_wrong(keys_file, tmp_path) -> None:
    section = ServerSection(keys_file=keys_file())
    ring = Keyring(section)
    path = Path(keys_file("tenants = 3"))
    with pytest.raises(ConfigError, match=r"keys\.toml: alice: tenants"):
        ring.load(section)
    path.write_text("[bob\n")
    with pytest.raises(ConfigError, match=r"keys\.toml: not valid TOML"):
        ring.load(section)
    path.write_text(f'[a]\nhash = "{hash_key(USER)}"\n[b]\nhash = "{hash_key(USER)}"\n')
    with pytest.raises(ConfigError, match="same hash"):
        ring.load(section)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        ring.load(section)
    assert ring.user(f"Bearer {USER}") is not None
    with pytest.raises(Unauthorized):
        ring.user(f"Bearer {OTHER}")
