"""A running daemon for tests: its process, its log, and requests to it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

Start = Callable[..., Any]


class Daemon:
    """A running ``skippy-sched serve``; ``log`` holds the lines read so far."""

    def __init__(self, process: subprocess.Popen[str], config: Path) -> None:
        self.process = process
        self.config = config
        self._connections = ExitStack()
        self.log: list[dict[str, Any]] = []
        self.url = ""
        self.port = 0

    def start(self) -> None:
        self.url = self.wait_for("serving")["url"]
        port = self.url.rpartition(":")[2]
        self.port = int(port) if port.isdigit() else 0

    def wait_for(self, event: str) -> dict[str, Any]:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(json.loads(line))
            if self.log[-1]["event"] == event:
                return self.log[-1]
        raise AssertionError(f"{event!r} was not logged, only {self.log}")

    def connect(self) -> HTTPConnection:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=20)
        self._connections.callback(connection.close)
        return connection

    def send(self, headers: dict[str, str] | None = None, **fields: Any) -> HTTPConnection:
        """A request whose answer is not awaited."""
        connection = self._last = self.connect()
        body = json.dumps({"prompt": "hello", "temperature": 0, **fields})
        headers = {"content-type": "application/json", **(headers or {})}
        connection.request("POST", "/v1/completions", body, headers)
        return connection

    def answer(self, connection: HTTPConnection) -> HTTPResponse:
        return self._connections.enter_context(connection.getresponse())

    def ask(self, **fields: Any) -> HTTPResponse:
        return self.answer(self.send(**fields))

    def stream(self, max_tokens: int, **fields: Any) -> HTTPResponse:
        """A stream whose first event has come."""
        response = self.ask(stream=True, max_tokens=max_tokens, **fields)
        assert response.status == 200
        assert response.readline().startswith(b"data: ")
        return response

    def get(self, path: str) -> HTTPResponse:
        connection = self.connect()
        connection.request("GET", path)
        return self.answer(connection)

    def close(self) -> None:
        self._connections.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def scrape(self) -> bytes:
        return self.get("/metrics").read()

    def metrics_until(self, sample: str) -> str:
        """Scrape until this sample is there: the server learns of a closed socket by itself."""
        for _ in range(100):
            text = self.scrape().decode()
            if sample in text:
                return text
        raise AssertionError(f"{sample} did not come")

    def close_connections(self) -> None:
        """All that were opened here."""
        self._connections.close()

    def hang_up(self, response: HTTPResponse) -> None:
        """Close the socket under a response."""
        response.close()
        self._last.close()

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self) -> int:
        assert self.process.stderr is not None
        self.log += [json.loads(line) for line in self.process.stderr]
        return self.process.wait(timeout=20)


@contextmanager
def serving(config: Path) -> Iterator[Daemon]:
    """``skippy-sched serve`` with this file, from ready to killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", "skippy_sched", "serve", "-c", str(config)],
        stderr=subprocess.PIPE,
        text=True,
    )
    daemon = Daemon(process, config)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()
