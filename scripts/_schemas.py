"""Random JSON schemas, from small to nested, of the keywords that people use."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]

_NAMES = ("id", "name", "größe", "tags", "next step", "ok", 'quoted "x"', "list", "when", "a.b")
_PATTERNS = (r"^[A-Z]{2}-\d{3}$", r"^(red|green|blue)$", r"^\d{4}-\d{2}$", r"^[a-f0-9]{8}$")
#: A model can fill a longer one without end.
_TEXT_CHARS_MAX = 12


def random_schema(rng: random.Random) -> Schema:
    """Answers to it have an end; its objects allow nothing that it does not name."""
    shared = {"shared": _schema(rng, 2, [])} if rng.random() < 0.3 else {}
    schema = _schema(rng, 0, list(shared))
    return {**schema, "$defs": shared} if shared else schema


def _schema(rng: random.Random, depth: int, shared: list[str]) -> Schema:
    kinds = [_text, _whole_number, _choice, _yes_or_no, _nothing, _constant]
    if depth < 3:
        kinds += [_object, _object, _array, _either]
    if depth == 0:
        kinds = [_object, _object, _array, _either, _text, _whole_number]
    if depth and shared and rng.random() < 0.3:
        return {"$ref": f"#/$defs/{rng.choice(shared)}"}
    return rng.choice(kinds)(rng, depth, shared)


def _object(rng: random.Random, depth: int, shared: list[str]) -> Schema:
    names = rng.sample(_NAMES, rng.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: _schema(rng, depth + 1, shared) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int, shared: list[str]) -> Schema:
    least = rng.randrange(3)
    most = least + rng.randrange(3)
    return {
        "type": "array",
        "items": _schema(rng, depth + 1, shared),
        "minItems": least,
        "maxItems": most,
    }


def _either(rng: random.Random, depth: int, shared: list[str]) -> Schema:
    return {"anyOf": [_schema(rng, depth + 1, shared) for _ in range(rng.randrange(2, 4))]}


def _text(rng: random.Random, depth: int, shared: list[str]) -> Schema:
    if rng.random() < 0.4:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    least = rng.randrange(4)
    return {
        "type": "string",
        "minLength": least,
        "maxLength": rng.randrange(least, _TEXT_CHARS_MAX + 1),
    }


def _whole_number(rng: random.Random, depth: int, shared: list[str]) -> Schema:
    least = rng.choice((-1000, -3, 0, 1, 17))
    return {"type": "integer", "minimum": least, "maximum": least + rng.randrange(2000)}


def _choice(rng: random.Random, depth: int, shared: list[str]) -> Schema:
    values = ["yes", "no", "perhaps", 1, 2.5, None, True, "ü\n", ""]
    return {"enum": rng.sample(values, rng.randrange(1, 5))}


def _yes_or_no(rng: random.Random, depth: int, shared: list[str]) -> Schema:
    return {"type": "boolean"}


def _nothing(rng: random.Random, depth: int, shared: list[str]) -> Schema:
    return {"type": rng.choice(("null", ["null", "boolean"]))}


def _constant(rng: random.Random, depth: int, shared: list[str]) -> Schema:
    return {"const": rng.choice(("fixed", 3, False, {"a": [1]}))}
