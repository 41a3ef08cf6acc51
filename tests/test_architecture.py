"""Imports run one way: server to scheduler to native; and nothing below knows what is above."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import skippy_sched

PACKAGE = Path(skippy_sched.__file__).parent
FORBIDDEN = {
    "native": ("skippy_sched.scheduler", "skippy_sched.server", "skippy_sched.config"),
    "scheduler": ("skippy_sched.server", "starlette", "uvicorn", "httptools"),
    "server": ("skippy_sched.native.session", "skippy_sched.native.batch"),
}


def imports(path: Path) -> Iterator[str]:
    package = ("skippy_sched", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join((*base, node.module or "")).rstrip(".")


@pytest.mark.parametrize("folder", sorted(FORBIDDEN))
def test_no_import_points_upward(folder: str) -> None:
    files = sorted((PACKAGE / folder).rglob("*.py"))
    assert files
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in files
        for name in imports(path)
        if name.startswith(FORBIDDEN[folder])
    ]
    assert wrong == []
