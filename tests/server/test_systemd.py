"""What systemd is told: readiness after a computed token, the end, and progress."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skippy_sched.server.systemd import Notifier


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """Where a service manager would listen."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(20)
        yield listener


def test_the_daemon_is_ready_once_it_has_computed_and_says_when_it_stops(
    manager, tmp_path, sim_model
):
    command = [sys.executable, "-m", "skippy_sched", "serve", "--library", "sim", "--port", "0"]
    with subprocess.Popen(
        [*command, "--model", str(sim_model())],
        env={"PATH": "", "NOTIFY_SOCKET": str(tmp_path / "notify")},
        stderr=subprocess.PIPE,
    ) as process:
        assert manager.recv(4096).startswith(b"READY=1\nSTATUS=serving model-1")
        process.send_signal(signal.SIGTERM)
        assert manager.recv(4096).startswith(b"STOPPING=1")
        _, log = process.communicate(timeout=20)
        assert process.returncode == 0
    events = log.decode()
    assert events.index('"readiness"') < events.index('"serving"')


def test_a_reload_is_told_from_its_beginning_to_its_end(manager, tmp_path, sim_model):
    command = [sys.executable, "-m", "skippy_sched", "serve", "--library", "sim", "--port", "0"]
    with subprocess.Popen(
        [*command, "--model", str(sim_model())],
        env={"PATH": "", "NOTIFY_SOCKET": str(tmp_path / "notify")},
        stderr=subprocess.DEVNULL,
    ) as process:
        assert manager.recv(4096).startswith(b"READY=1")
        process.send_signal(signal.SIGHUP)
        reloading, _, instant = manager.recv(4096).partition(b"\nMONOTONIC_USEC=")
        assert reloading == b"RELOADING=1"
        assert instant.isdigit()
        assert manager.recv(4096) == b"READY=1"
        process.terminate()
        assert manager.recv(4096).startswith(b"STOPPING=1")


def test_an_engine_that_cannot_compute_is_not_called_ready(manager, tmp_path, sim_model):
    fault = "call=iteration nth=1 count=0 status=RUNTIME_ERROR"
    command = [sys.executable, "-m", "skippy_sched", "serve", "--library", "sim", "--port", "0"]
    with subprocess.Popen(
        [*command, "--model", str(sim_model(fault=fault))],
        env={"PATH": "", "NOTIFY_SOCKET": str(tmp_path / "notify")},
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stderr is not None
        assert any(b"first_iteration_failed" in line for line in process.stderr)
        process.terminate()
        assert manager.recv(4096).startswith(b"STOPPING=1")


async def test_the_watchdog_is_fed_only_while_there_is_progress(manager, tmp_path):
    environ = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "2000"}
    asked = asyncio.Event()
    answers = iter([True, False, False])

    def makes_progress() -> bool:
        answer = next(answers, None)
        if answer is None:
            asked.set()
        return bool(answer)

    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(Notifier(environ).watch(makes_progress))
        await asked.wait()
        watch.cancel()
    assert manager.recv(4096) == b"WATCHDOG=1"
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(4096)


async def test_without_a_manager_nothing_is_sent_or_waited_for():
    notifier = Notifier({})
    notifier.ready("x")
    await notifier.watch(lambda: True)
    assert not notifier.is_wanted
