"""The configuration reference as a page: every key with type, bounds, default and meaning.

Knows the models of config.py only. ``python -m skippy_sched.config_page`` writes this page and
``config/reference.toml`` anew, to be run in the repository after a change to config.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skippy_sched.config import Config
from skippy_sched.config_file import ENV_PREFIX, reference_toml

_HEAD = f"""# Configuration

Every key, generated from the models that check it.
Values come from, in rising order: the defaults, the TOML file, environment variables, and \
flags of the command line.
A variable's name is `{ENV_PREFIX}SECTION__KEY`, such as `{ENV_PREFIX}ENGINE__LANES=8`; \
its value is read as a TOML value, or as text where the key takes text.
`skippy-sched check-config FILE` tells every problem of a file with its line, or what \
file and environment come to.
Keys that are unset by default have "unset" in place of a value.
A running daemon takes over changes of the keys that are marked ↻ when it gets SIGHUP.
"""
_TYPES = {
    "integer": "integer",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "array": "list",
    "object": "table",
}


def page() -> str:
    """``docs/configuration.md`` is this text."""
    schema = Config.model_json_schema()
    blocks = [_HEAD]
    for name, reference in schema["properties"].items():
        section = schema["$defs"][reference["$ref"].rpartition("/")[2]]
        rows = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
        rows += [_row(key, value, schema) for key, value in section["properties"].items()]
        blocks.append(f"## `[{name}]`\n\n" + "\n".join(rows) + "\n")
    return "\n".join(blocks)


def _row(key: str, value: dict[str, Any], schema: dict[str, Any]) -> str:
    options = [_type(option, schema) for option in value.get("anyOf", [value])]
    kind = " or ".join(option for option in options if option)
    mark = " ↻" if value.get("reloadable") else ""
    cells = (f"`{key}`{mark}", kind, _default(value.get("default")), value.get("description", ""))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _type(option: dict[str, Any], schema: dict[str, Any]) -> str:
    """In words, with its bounds; empty for null, which is how unset is written."""
    if "$ref" in option:
        option = schema["$defs"][option["$ref"].rpartition("/")[2]]
    if option.get("type") == "null":
        return ""
    if "enum" in option or "const" in option:
        return ", ".join(f'`"{each}"`' for each in option.get("enum", [option.get("const")]))
    word = _TYPES[option["type"]]
    if "properties" in option:
        word += " with " + ", ".join(f"`{name}`" for name in option["properties"])
    elif option["type"] == "array":
        word += f" of {_type(option['items'], schema)}"
    elif isinstance(of := option.get("additionalProperties"), dict):
        word += f" of {_type(of, schema)}"
    return word + "".join(f", {bound}" for bound in _bounds(option))


def _bounds(option: dict[str, Any]) -> Iterator[str]:
    low, high = option.get("minimum"), option.get("maximum")
    if low is not None and high is not None:
        yield f"{low:,} to {high:,}"
    elif low is not None:
        yield f"at least {low:,}"
    elif high is not None:
        yield f"at most {high:,}"
    if (above := option.get("exclusiveMinimum")) is not None:
        yield f"above {above:,}"
    if (pattern := option.get("pattern")) is not None:
        yield f"of the form `{pattern}`"


def _default(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f'`"{value}"`' if isinstance(value, str) else f"`{value}`"


def main() -> None:
    Path("docs/configuration.md").write_text(page(), encoding="utf-8")
    Path("config/reference.toml").write_text(reference_toml(), encoding="utf-8")


if __name__ == "__main__":
    main()
