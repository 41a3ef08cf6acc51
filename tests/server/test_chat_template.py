"""Chat templates of model files: what they may use, and what stops them."""

from __future__ import annotations

import pytest

from skippy_sched.errors import InvalidRequest
from skippy_sched.server.chat_template import ChatTemplate
from skippy_sched.server.wire import Message


def render(source: str | None, *contents: str, bos: str = "<s>", eos: str = "</s>") -> str:
    messages = [Message(role="user", content=content) for content in contents or ("hi",)]
    return ChatTemplate(source, bos=bos, eos=eos).render(messages)


def test_a_chatml_template_gives_turns_and_the_prompt_for_the_next() -> None:
    source = (
        "{% for message in messages %}\n"
        "  {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}\n"
        "{%- endfor %}\n"
        "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    )
    assert render(source) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}x{{ eos_token }}", "<s>x</s>"),
        ("{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}a{% endfor %}", "a"),
        ("{{ {'a<b': 'ü'} | tojson }}", '{"a<b": "ü"}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
        ("{{ 'with' if tools else 'without' }}", "without"),
    ],
)
def test_what_model_files_use_is_there(source: str, expected: str) -> None:
    assert render(source, "a", "b") == expected


def test_a_model_without_a_template_gets_plain_turns() -> None:
    assert render(None) == "user: hi\nassistant:"


def test_a_template_that_refuses_the_messages_is_the_clients_error() -> None:
    with pytest.raises(InvalidRequest, match="refuses: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
    ],
)
def test_a_template_without_measure_is_stopped(source: str) -> None:
    with pytest.raises(InvalidRequest, match="too costly"):
        render(source)


@pytest.mark.parametrize(
    "source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ messages[9].x.y }}"]
)
def test_a_template_cannot_leave_the_sandbox_nor_crash_the_server(source: str) -> None:
    with pytest.raises(InvalidRequest, match="fails on these messages"):
        render(source)


def test_a_template_that_does_not_compile_says_so() -> None:
    with pytest.raises(ValueError, match="does not compile"):
        render("{% for %}")
