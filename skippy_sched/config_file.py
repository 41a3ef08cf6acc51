"""Makes a Config out of defaults, a TOML file, the environment and flags, in rising order.

Knows where each value came from, so that every error names file and line, variable or flag.
Does not know what the values are used for.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from skippy_sched.config import Config
from skippy_sched.errors import ConfigError

ENV_PREFIX = "SKIPPY_SCHED__"

#: Longer values are cut in messages: one line must stay readable.
SHOWN_CHARS_MAX = 80

#: Keys whose values are never shown; in the environment they are separated by commas.
SECRETS = ("api_keys", "admin_keys")

#: (section, key); a wrong section has an empty key.
Place = tuple[str, str]


@dataclass(slots=True)
class Sources:
    """The merged values, and for each place the words that lead a user to it."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Place, str] = field(default_factory=dict)

    def put(self, section: str, key: str, value: object, origin: str) -> None:
        table = self.values.setdefault(section, {})
        if isinstance(table, dict):
            table[key] = value
            self.origins[section, key] = origin

    def origin(self, section: str, key: str) -> str:
        return self.origins.get((section, key)) or self.origins.get((section, ""), "configuration")


def load_config(
    path: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, tuple[Place, object]] | None = None,
) -> Config:
    """``flags`` maps a flag's name to its place and value.

    Raises ConfigError with one line per problem, all of them at once.
    """
    sources = Sources()
    if path is not None:
        _read_file(path, sources)
    _read_environment(os.environ if environ is None else environ, sources)
    for flag, ((section, key), value) in (flags or {}).items():
        sources.put(section, key, value, flag)
    try:
        return Config.model_validate(sources.values)
    except ValidationError as error:
        raise ConfigError("\n".join(_problems(error, sources))) from None


# --- reading --------------------------------------------------------------------------------------


def _read_file(path: Path, sources: Sources) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    lines = _lines_of_keys(text)
    for section, table in document.items():
        line = lines.get((section, ""), 0)
        sources.origins[section, ""] = f"{path}:{line}" if line else str(path)
        sources.values[section] = table
        if isinstance(table, dict):
            for key in table:
                at = lines.get((section, key), line)
                sources.origins[section, key] = f"{path}:{at}" if at else str(path)


_HEADER = re.compile(r"\s*\[\s*([\w\"'.\s-]+?)\s*\]\s*(?:#.*)?$")
_ASSIGNMENT = re.compile(r"\s*([\w\"'.\s-]+?)\s*=")
_INLINE_KEY = re.compile(r"[{,]\s*([\w\"'-]+)\s*=")


def _lines_of_keys(text: str) -> dict[Place, int]:
    """Line numbers of sections and keys of a text that is valid TOML; the parser has none."""
    found: dict[Place, int] = {}
    section = ""
    fence = ""  # the quotes that close the multi-line string we are in
    for number, line in enumerate(text.splitlines(), start=1):
        if fence:
            if fence in line:
                fence = ""
            continue
        if header := _HEADER.match(line):
            section = _plain(header[1])
            found.setdefault((section.partition(".")[0], ""), number)
        elif assignment := _ASSIGNMENT.match(line):
            name = _plain(assignment[1])
            top, _, key = f"{section}.{name}".lstrip(".").partition(".")
            found.setdefault((top, ""), number)
            found.setdefault((top, key.partition(".")[0]), number)
            if not section and not key:
                for inline in _INLINE_KEY.finditer(line):
                    found.setdefault((top, _plain(inline[1])), number)
            for quotes in ('"""', "'''"):
                if line.count(quotes) == 1:
                    fence = quotes
    return found


def _plain(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))


def _read_environment(environ: Mapping[str, str], sources: Sources) -> None:
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX):
            continue
        section, separator, key = name.removeprefix(ENV_PREFIX).lower().partition("__")
        if not separator or not section or not key:
            raise ConfigError(f"{name}: the form is {ENV_PREFIX}SECTION__KEY")
        sources.origins.setdefault((section, ""), name)
        sources.put(section, key, _environment_value(section, key, environ[name]), name)


def _environment_value(section: str, key: str, raw: str) -> object:
    """Text where the key takes text; anything else is read as a TOML value."""
    info = _field(section, key)
    annotation = None if info is None else info.annotation
    if annotation is str or _is_text_choice(annotation):
        return raw
    try:
        value: object = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = raw
    if key in SECRETS and not isinstance(value, list):
        return [part.strip() for part in raw.split(",") if part.strip()]
    return value


def _is_text_choice(annotation: object) -> bool:
    """``str | None`` or a Literal of texts."""
    return any(option is str or isinstance(option, str) for option in get_args(annotation))


def _sections() -> dict[str, type[BaseModel]]:
    return {
        name: info.annotation
        for name, info in Config.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)
    }


def _field(section: str, key: str) -> FieldInfo | None:
    model = _sections().get(section)
    return None if model is None else model.model_fields.get(key)


# --- problems in words ----------------------------------------------------------------------------


def _problems(error: ValidationError, sources: Sources) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        names = [str(part) for part in problem["loc"] if not isinstance(part, int)]
        section, key = (*names[:2], "", "")[:2]
        place = ".".join(part for part in (section, key) if part) or "configuration"
        found = "(not shown)" if key in SECRETS else _shown(problem["input"])
        yield f"{sources.origin(section, key)}: {place}: {_sentence(problem, section, key, found)}"


def _sentence(problem: Any, section: str, key: str, found: str) -> str:
    kind, bounds = problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(section, key)
    if kind in ("model_type", "model_attributes_type"):
        return f"expected a table of keys, found {found}"
    if kind == "value_error":
        return str(bounds["error"])
    if kind == "literal_error":
        return f"expected {bounds['expected']}, found {found}"
    if kind == "string_pattern_mismatch":
        return f"expected a text of the form {bounds['pattern']}, found {found}"
    if kind == "string_too_short":
        return "expected a text that is not empty"
    for bound, word in (("ge", "below"), ("gt", "not above"), ("le", "above")):
        if bound in bounds:
            return f"{found} is {word} {_number(bounds[bound])}"
    expected = {
        "int_type": "an integer",
        "float_type": "a number",
        "string_type": "a text in quotes",
        "bool_type": "true or false",
        "tuple_type": "a list",
    }
    if kind in expected:
        return f"expected {expected[kind]}, found {found}"
    return f"{problem['msg']}, found {found}"


def _unknown(section: str, key: str) -> str:
    known = list(_sections()) if not key else list(_sections()[section].model_fields)
    noun = "key" if key else "section"
    near = difflib.get_close_matches(key or section, known, n=1)
    if near:
        return f"unknown {noun}; did you mean {near[0]}?"
    return f"unknown {noun}; the {noun}s are {', '.join(known)}"


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[: SHOWN_CHARS_MAX - 1] + "…"


# --- writing --------------------------------------------------------------------------------------


def to_toml(config: Config) -> str:
    """The effective configuration as TOML; unset keys and API keys are comments."""
    blocks = []
    for section in _sections():
        table: BaseModel = getattr(config, section)
        lines = [f"[{section}]"]
        lines += [_assignment(key, getattr(table, key)) for key in type(table).model_fields]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def reference_toml() -> str:
    """Every key with its description and default; ``config/reference.toml`` is this text."""
    blocks = ["# Every key of skippy-sched, with its default. Unset keys are commented out."]
    for section, model in _sections().items():
        lines = [f"[{section}]"]
        for key, info in model.model_fields.items():
            if info.description:
                lines.append(f"# {info.description}")
            lines.append(_assignment(key, info.get_default(call_default_factory=True)))
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _assignment(key: str, value: object) -> str:
    if value is None:
        return f"# {key} ="
    if isinstance(value, tuple) and any(isinstance(item, SecretStr) for item in value):
        return f"# {key}: {len(value)} set, not shown"
    return f"{key} = {_toml(value)}"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, except that TOML also escapes DEL.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return str(value)
