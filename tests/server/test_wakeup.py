"""The event loop's thread, and only it, goes before the threads that compute."""

from __future__ import annotations

import ctypes
import platform
import threading

import pytest

from skippy_sched.server import wakeup

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
KERNEL_WITH_SLICES = (6, 12)


def slice_ns() -> int:
    """Of the calling thread; 0 means that the kernel tells none."""
    found = ctypes.create_string_buffer(wakeup.SCHED_ATTR.size)
    number = SCHED_GETATTR[platform.machine()]
    assert ctypes.CDLL(None).syscall(number, 0, found, wakeup.SCHED_ATTR.size, 0) == 0
    return int(wakeup.SCHED_ATTR.unpack(found.raw)[5])


def kernel_has_slices() -> bool:
    version = tuple(int(part) for part in platform.release().split(".")[:2] if part.isdigit())
    return platform.machine() in SCHED_GETATTR and version >= KERNEL_WITH_SLICES


@pytest.mark.skipif(not kernel_has_slices(), reason="slices came with Linux 6.12")
def test_the_calling_thread_has_a_short_slice_and_those_it_starts_do_not() -> None:
    found: list[int] = []

    def ask() -> None:
        before = slice_ns()
        wakeup.run_promptly()
        found.extend((before, slice_ns()))
        child = threading.Thread(target=lambda: found.append(slice_ns()))
        child.start()
        child.join()

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    before, mine, childs = found
    assert mine == wakeup.SLICE_NS < before
    assert childs == before


@pytest.mark.parametrize("machine", ["riscv64", "x86_64"])
def test_where_it_cannot_be_had_nothing_happens(
    machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(wakeup, "SCHED_SETATTR", {"x86_64": -1})  # no such call: ENOSYS
    wakeup.run_promptly()
