"""Tells systemd how the daemon is: ready, stopping, alive. Does nothing outside of systemd.

Knows the notification socket's datagrams; what counts as progress is said by the caller.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping

from skippy_sched.clock import MonotonicClock


class Notifier:
    """Sends to ``NOTIFY_SOCKET``; a manager that does not listen is not our failure."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        path = environ.get("NOTIFY_SOCKET", "")
        #: "@" stands for the NUL byte that begins an abstract address
        self._address = "\0" + path[1:] if path.startswith("@") else path
        period_us = environ.get("WATCHDOG_USEC", "")
        self._is_ready = False
        self._period_s = int(period_us) / 1e6 if period_us.isdigit() else 0.0

    @property
    def is_wanted(self) -> bool:
        return bool(self._address)

    def ready(self, status: str) -> None:
        self._is_ready = True
        self._send(f"READY=1\nSTATUS={status}")

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Around a reload, whatever comes of it; nothing before the daemon is ready."""
        if self._is_ready:
            self._send(f"RELOADING=1\nMONOTONIC_USEC={int(MonotonicClock().now() * 1e6)}")
        yield
        if self._is_ready:
            self._send("READY=1")

    def stopping(self) -> None:
        self._send("STOPPING=1\nSTATUS=draining")

    async def watch(self, makes_progress: Callable[[], bool]) -> None:
        """Feed the watchdog twice a period while there is progress; runs until cancelled."""
        while self.is_wanted and self._period_s > 0:
            if makes_progress():
                self._send("WATCHDOG=1")
            await asyncio.sleep(self._period_s / 2)

    def _send(self, text: str) -> None:
        if not self._address:
            return
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender,
        ):
            sender.setblocking(False)
            sender.sendto(text.encode(), self._address)
