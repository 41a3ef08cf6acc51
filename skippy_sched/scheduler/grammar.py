"""Answers that have to fit a grammar: compiling one, and following it token by token.

llguidance (https://github.com/guidance-ai/llguidance) does the parsing; what may come next is a
bit per token, which the native layer lays over its logits. Knows schemas, grammars and a model's
vocabulary; does not know requests or HTTP.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NewType
from weakref import WeakKeyDictionary, proxy

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import gbnf_to_lark

from skippy_sched.native import Model

#: A schema that people wrote has a few kilobytes; ten times that still compiles in milliseconds.
TEXT_BYTES_MAX = 64 * 1024
#: Compiled grammars kept, for those who use them and the next request with the same one.
COMPILED_MAX = 256
#: Subschemas tried one by one to find the place of an error.
PLACES_MAX = 500

#: What a mask may cost: some milliseconds at worst, and 100 MB of a lexer's states.
_LIMITS = LLParserLimits(max_lexer_states=50_000, max_grammar_size=200_000, verbose_errors=False)
#: As most writers of JSON do it. Free white space would let a model write nothing else for ever.
_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


#: Keywords whose value maps names to schemas, and such that are taken together with what is beside.
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_COMBINING = frozenset(("anyOf", "oneOf", "$ref"))

NOTHING_FITS = "no answer fits it"


class GrammarError(ValueError):
    """The grammar cannot be used; ``place`` is where in a schema, such as "properties.age"."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(message)
        self.place = place


#: In llguidance's own form. It was compiled once, so it can be compiled again where it arrives.
Grammar = NewType("Grammar", str)


class Guide:
    """Where one answer stands in its grammar. ``position`` is the next token's it has not seen."""

    def __init__(self, matcher: LLMatcher, position: int, words: int) -> None:
        self._matcher = matcher
        self._position = position
        self._mask: np.ndarray[Any, np.dtype[np.uint32]] = np.zeros(words, dtype=np.uint32)

    def advance(self, start: int, tokens: Sequence[int]) -> None:
        """Tokens at positions ``start`` and up; those it knows, and the prompt's, change nothing.

        Raises GrammarError for a token that does not fit.
        """
        new = tokens[max(0, self._position - start) :]
        if not new:
            return
        self._position += len(new)
        if not self._matcher.consume_tokens(list(new)):
            raise GrammarError(f"the answer has left its grammar: {self._matcher.get_error()}")

    def mask(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        """The tokens that may come next, bit t % 32 of word t // 32; valid until the next call.

        Raises GrammarError when the grammar is too costly to follow, or leads nowhere.
        """
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self._matcher.is_error():
            reason = _first_lines(self._matcher.get_error())
            nothing = "NoExtension" in reason
            raise GrammarError(NOTHING_FITS if nothing else f"it is too costly to follow: {reason}")
        return self._mask


class Grammars:
    """Compiles grammars for one model's vocabulary; used by any thread."""

    def __init__(self, model: Model) -> None:
        # Weak: an entry of _GRAMMARS must not keep its own key alive.
        self._model: Model = proxy(model)
        self._words = -(-model.facts.n_vocab // 32)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def compile_schema(self, schema: dict[str, Any], *, lenient: bool = False) -> Grammar:
        """Of a JSON schema; ``lenient`` as in ``styled``. Raises GrammarError."""
        schema = styled(schema, lenient=lenient)
        try:
            return self._compile(_json_grammar(schema))
        except GrammarError as error:
            place, reason = self._place(schema, str(error))
            raise GrammarError(reason, place) from None

    def compile_gbnf(self, text: str) -> Grammar:
        """Of a grammar in llama.cpp's notation, whose first rule is ``root``."""
        _check_size(text)
        try:
            lark: str = gbnf_to_lark(text)
        except Exception as error:  # the converter has no narrower type for a missing rule
            raise GrammarError(str(error) or type(error).__name__) from None
        return self.compile_lark(lark)

    def compile_lark(self, text: str) -> Grammar:
        """Of a grammar in Lark's notation, with llguidance's additions; raises GrammarError."""
        return self._compile(LLMatcher.grammar_from_lark(text))

    def guide(self, grammar: Grammar, start: int, answer: Sequence[int]) -> Guide:
        """For an answer whose first token has position ``start`` and that is so far ``answer``."""
        guide = Guide(self._compiled_form(grammar).deep_copy(), start, self._words)
        guide.advance(start, answer)
        return guide

    def _compile(self, text: str) -> Grammar:
        _check_size(text)
        self._compiled_form(text)
        return Grammar(text)

    def _compiled_form(self, text: str) -> LLMatcher:
        """Takes up to 100 ms the first time."""
        with self._lock:
            known = self._compiled.get(text)
            if known is not None:
                self._compiled.move_to_end(text)
                return known
        matcher = self._checked(text)
        with self._lock:
            self._compiled[text] = matcher
            if len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        return matcher

    def _checked(self, text: str) -> LLMatcher:
        matcher = LLMatcher(self._vocabulary(), text, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_first_lines(matcher.get_error()))
        if not Guide(matcher.deep_copy(), 0, self._words).mask().any():
            raise GrammarError(NOTHING_FITS)
        return matcher

    def _vocabulary(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                wrapper = TokenizerWrapper(_Vocabulary(self._model))
                self._tokenizer = LLTokenizer(wrapper, eos_token=wrapper._gtokenizer.end_tokens)
            return self._tokenizer

    def _place(self, schema: dict[str, Any], reason: str) -> tuple[str, str]:
        """The innermost subschema that cannot be used by itself either, and why."""
        common = ("$defs", "definitions", "x-guidance")
        shared: dict[str, Any] = {key: schema[key] for key in common if key in schema}
        place: list[str] = []
        tried = 0
        inner: Any = schema
        while True:
            for key, child in _children(inner):
                tried += 1
                if tried > PLACES_MAX:
                    return ".".join(place), reason
                try:
                    self._checked(_json_grammar({**child, **shared}))
                except GrammarError as error:
                    place += key
                    inner, reason = child, str(error)
                    break
            else:
                return ".".join(place), reason


_GRAMMARS: WeakKeyDictionary[Model, Grammars] = WeakKeyDictionary()


def grammars_of(model: Model) -> Grammars:
    """One for all who use this model: what an engine compiled, its executor finds compiled."""
    return _GRAMMARS.setdefault(model, Grammars(model))


class _Vocabulary:
    """A model's tokens as llguidance reads them: special ones are marked by a byte 0xff."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.tokens: list[bytes] = []
        self.end_tokens: list[int] = []
        for token in range(model.facts.n_vocab):
            piece = model.detokenize([token])
            is_end = model.is_eog(token)
            if is_end:
                self.end_tokens.append(token)
            self.tokens.append(b"\xff" + piece if is_end or model.is_control(token) else piece)
        if not self.end_tokens:
            raise GrammarError("the model has no token that ends an answer")
        self.bos_token_id = model.facts.token_bos if model.facts.token_bos >= 0 else None
        self.eos_token_id = self.end_tokens[0]
        self.special_token_ids: list[int] = []

    def __call__(self, text: str) -> list[int]:
        return self._model.tokenize(text, add_special=False)


def styled(schema: dict[str, Any], *, lenient: bool = False) -> dict[str, Any]:
    """A schema with how its JSON is written; ``lenient``: keywords that cannot be held to are no
    error.

    Objects get the properties that are named and, where nothing is said of others, no others: that
    fits the schema too, and a model that may invent properties may do so for ever.
    """
    if '"allOf"' not in json.dumps(schema):  # its parts would exclude each other's properties
        schema = _closed(schema)
    return {**schema, "x-guidance": {**_JSON_STYLE, "lenient": lenient}}


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {}
    combines = "properties" in schema and not _COMBINING.isdisjoint(schema)
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, dict):
            closed[key] = {name: _closed(child) for name, child in value.items()}
        elif key in _COMBINING and isinstance(value, list) and not combines:
            closed[key] = [_closed(child) for child in value]
        elif key in ("items", "additionalProperties"):
            closed[key] = _closed(value)
        elif key == "prefixItems" and isinstance(value, list):
            closed[key] = [_closed(child) for child in value]
        else:
            closed[key] = value
    if "properties" in schema and not combines:
        closed.setdefault("additionalProperties", False)
    return closed


def _json_grammar(schema: dict[str, Any]) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise GrammarError(str(error)) from None


def _check_size(text: str) -> None:
    if len(text) > TEXT_BYTES_MAX:
        raise GrammarError(
            f"it has {len(text)} characters, more than {TEXT_BYTES_MAX}; make it smaller"
        )


def _first_lines(error: str) -> str:
    """What matters of a message; the rest shows the parser's inside."""
    return " ".join(error.partition("<state>")[0].split())[:400]


def _children(schema: Any) -> list[tuple[list[str], dict[str, Any]]]:
    """The subschemas that a schema is made of, with the keys that lead to them."""
    found: list[tuple[list[str], dict[str, Any]]] = []
    for key, value in schema.items():
        if key in _NAMED:
            named = value.items() if isinstance(value, dict) else ()
            found += [([key, name], child) for name, child in named if isinstance(child, dict)]
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            found.append(([key], value))
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            found += [([key, str(i)], v) for i, v in enumerate(value) if isinstance(v, dict)]
    return found
