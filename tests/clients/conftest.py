"""A daemon on the simulated engine, on a real socket, for clients that nobody wrote for us."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

KEY = "sk-test"

#: The template's whole output is the prompt, so a script in it makes the answer known. A message
#: that holds a script of its own decides the answer instead; tools are told by their names.
TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}</tool_call>{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if '<|script|>' not in messages[-1].content %}<|script|>Hello there!<|end|>{% endif %}"
)

#: Streams of more than a few tokens break off in the midst.
FAILING = "fault = call=iteration nth=4 index=0 status=RUNTIME_ERROR count=0"

CONFIG = """
[model]
path = "{model}"
name = "sim"
[engine]
library = "sim"
lanes = 4
context_tokens = 512
[server]
port = 0
api_keys = ["{key}"]
admin_keys = ["sk-admin"]
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that install other packages run only when they are asked for."""
    if "clients" in config.option.markexpr:
        return
    dropped = [item for item in items if item.get_closest_marker("clients")]
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in dropped]


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The daemon's address; its model is called ``sim`` and its key is ``sk-test``."""
    with _daemon(tmp_path_factory.mktemp("daemon"), f"chat_template = {TEMPLATE}") as address:
        yield address


@pytest.fixture
def failing_url(tmp_path: Path) -> Iterator[str]:
    """A daemon whose engine fails from the fourth iteration on."""
    with _daemon(tmp_path, FAILING) as address:
        yield address


@contextmanager
def _daemon(folder: Path, spec: str) -> Iterator[str]:
    (folder / "model.sim").write_text(f"skippy-sim 1\n{spec}\n")
    config = folder / "config.toml"
    config.write_text(CONFIG.format(model=folder / "model.sim", key=KEY))
    log = folder / "log"
    command = [sys.executable, "-m", "skippy_sched", "serve", "-c", str(config)]
    with (
        log.open("w") as writing,
        log.open() as lines,
        subprocess.Popen(command, stderr=writing) as process,
    ):
        try:
            yield _serving(process, lines)
        finally:
            process.terminate()
            assert process.wait(timeout=20) == 0, log.read_text()


def _serving(process: subprocess.Popen[bytes], lines: Iterator[str]) -> str:
    """Follow the log until the daemon serves."""
    while process.poll() is None:
        for line in lines:
            entry = json.loads(line)
            if entry["event"] == "serving":
                return str(entry["url"])
    raise AssertionError("the daemon ended before it served")
