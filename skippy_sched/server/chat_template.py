"""Renders the model's own chat template.

Templates come from the model file, never from a request; the sandbox is for model files that
nobody has read. Knows Jinja and the habits of model files; does not know tokens.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skippy_sched.clock import wall_time
from skippy_sched.errors import InvalidRequest
from skippy_sched.server.tool_calls import OPEN
from skippy_sched.server.wire import Message, Tool

#: A prompt is at most the request's body and what the template puts around each message; far more
#: than that is a template gone wrong.
OUTPUT_CHARS_MAX = 32 * 2**20

#: For models without a template: plain turns that most models can follow.
FALLBACK = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class _Refused(TemplateError):
    """The template itself does not accept these messages."""


class _Generation(Extension):
    """``{% generation %}`` marks text for training; to us it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """Raises ValueError when the template does not compile."""

    def __init__(self, source: str | None, *, bos: str, eos: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        source = source or FALLBACK
        try:
            self._template = environment.from_string(source)
            #: whether it tells the model of tools, and in the notation of tool_calls.py
            self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except TemplateError as error:
            raise ValueError(f"the model's chat template does not compile: {error}") from error
        self.reads_calls = self.takes_tools and OPEN in source
        self._fixed = {"bos_token": bos, "eos_token": eos, "documents": None}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt that asks for the next answer; ``variables`` are the client's, for what the
        template may ask of them. Raises InvalidRequest."""
        parts: list[str] = []
        size = 0
        try:
            given = {
                **(variables or {}),
                **self._fixed,
                "messages": [_fields(message) for message in messages],
                "tools": [tool.model_dump(exclude_none=True) for tool in tools] or None,
                "add_generation_prompt": True,
            }
            for part in self._template.generate(given):
                size += len(part)
                if size > OUTPUT_CHARS_MAX:
                    raise OverflowError
                parts.append(part)
        except _Refused as error:
            raise InvalidRequest(
                f"the model's chat template refuses: {error}", param="messages"
            ) from None
        except (OverflowError, RecursionError, MemoryError):
            raise InvalidRequest(
                "template too costly: the model's chat template does not end within its limits on "
                "these messages",
                param="messages",
            ) from None
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise InvalidRequest(
                f"the model's chat template fails on these messages: {error}", param="messages"
            ) from error
        return "".join(parts)


def _fields(message: Message) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True)
    if message.role == "developer":
        fields["role"] = "system"  # the newer name of the same role; templates know the older
    for call in fields.get("tool_calls", ()):
        # Clients send the arguments as a text, templates write them as an object.
        with contextlib.suppress(ValueError, RecursionError):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return fields


def _to_json(value: object, indent: int | None = None, **_: object) -> str:
    """Without the escapes for HTML that Jinja's own filter makes."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.fromtimestamp(wall_time()).astimezone().strftime(pattern)
