"""The application on a simulated model, driven through bare ASGI, without sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from skippy_sched.config import Config
from skippy_sched.errors import RequestError
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.observe import Observer, Statistics
from skippy_sched.scheduler.request import RequestParams
from skippy_sched.server.app import App
from skippy_sched.server.metrics import Metrics
from skippy_sched.server.served_model import serve_model
from tests.daemon_process import Daemon, Start
from tests.daemon_process import serving as process_serving

if TYPE_CHECKING:
    import trustme

JSON = "application/json"


@dataclass
class Response:
    """What the application sent; ``parts`` are its writes."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    @property
    def json(self) -> Any:
        return json.loads(self.body.decode("utf-8"))

    @property
    def error(self) -> Any:
        assert self.headers["content-type"] == JSON
        assert self.headers["x-request-id"]
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """The stream's events, which must end with [DONE]; comments are left out."""
        assert self.headers["content-type"] == "text/event-stream"
        lines = [line for line in self.body.decode("utf-8").split("\n\n") if line]
        data = [line.removeprefix("data: ") for line in lines if not line.startswith(":")]
        assert data[-1] == "[DONE]"
        return [json.loads(item) for item in data[:-1]]

    def text(self, index: int = 0) -> str:
        """A choice's text, of either endpoint, streamed or whole."""
        if self.headers["content-type"] == JSON:
            choice = self.json["choices"][index]
            return str(choice["text"] if "text" in choice else choice["message"]["content"])
        return "".join(self.deltas(index))

    def deltas(self, index: int = 0) -> list[str]:
        return [
            choice["text"] if "text" in choice else choice["delta"]["content"]
            for event in self.events
            for choice in event["choices"]
            if choice["index"] == index and choice["finish_reason"] is None
        ]

    def finish_reason(self, index: int = 0) -> str:
        choices = [self.json] if self.headers["content-type"] == JSON else self.events
        reasons = [
            choice["finish_reason"]
            for event in choices
            for choice in event["choices"]
            if choice["index"] == index and choice["finish_reason"] is not None
        ]
        assert len(reasons) == 1
        return str(reasons[0])


class Call:
    """One request under way; ``closed`` set: its client has closed the connection."""

    def __init__(self, chunks: Iterable[bytes], stalls: bool = False) -> None:
        self.response = Response()
        self.written = asyncio.Event()
        self.closed = asyncio.Event()
        self._chunks = list(chunks) or [b""]
        self._sent = 0
        self._stalls = stalls
        self.received = 0

    async def receive(self) -> dict[str, Any]:
        if self._sent < len(self._chunks):
            body = self._chunks[self._sent]
            self._sent += 1
            self.received += len(body)
            return {
                "type": "http.request",
                "body": body,
                "more_body": self._sent < len(self._chunks) or self._stalls,
            }
        await self.closed.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        response = self.response
        if message["type"] == "http.response.start":
            response.status = message["status"]
            response.headers = {k.decode(): v.decode() for k, v in message["headers"]}
        elif message["body"]:
            response.parts.append(message["body"])
        self.written.set()
        await asyncio.sleep(0)  # as a socket may

    async def next_write(self) -> None:
        await self.written.wait()
        self.written.clear()


class Client:
    """Sends requests to the application and reads what it says of itself."""

    def __init__(self, app: App, engine: Engine) -> None:
        self.app = app
        self.live = app.live
        self.engine = engine

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | Iterable[bytes] = b"",
        headers: dict[str, str] | None = None,
    ) -> Response:
        call = Call([body] if isinstance(body, bytes) else body)
        await self.run(call, method, path, headers)
        return call.response

    async def run(
        self, call: Call, method: str, path: str, headers: dict[str, str] | None = None
    ) -> None:
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(k.encode(), v.encode()) for k, v in (headers or {}).items()],
        }
        await self.app(scope, call.receive, call.send)

    async def get(self, path: str, **headers: str) -> Response:
        return await self.request("GET", path, headers=headers)

    async def post(self, path: str, body: Any, **headers: str) -> Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.request("POST", path, data, {"content-type": JSON, **headers})

    async def complete(self, prompt: Any, **fields: Any) -> Response:
        return await self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})

    async def chat(self, content: str = "hi", **fields: Any) -> Response:
        messages = [{"role": "user", "content": content}]
        return await self.post("/v1/chat/completions", {"messages": messages, **fields})

    async def both(self, prompt: Any, **fields: Any) -> tuple[Response, Response]:
        """The same request whole and streamed."""
        whole = await self.complete(prompt, **fields)
        return whole, await self.complete(prompt, stream=True, **fields)

    @asynccontextmanager
    async def calling(self, path: str, body: Any) -> AsyncIterator[Call]:
        """A request under way; leaving the block waits until the application is done with it."""
        call = Call([json.dumps(body).encode()])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.run(call, "POST", path, {"content-type": JSON}))
            yield call

    async def metrics(self) -> dict[str, float]:
        """Sample name with labels (but the model's) -> value."""
        text = (await self.get("/metrics")).body.decode()
        rows = [line for line in text.splitlines() if not line.startswith("#")]
        found = {}
        for row in rows:
            name, _, value = row.rpartition(" ")
            label = 'model_name="sim"'
            for form in (f",{label}", f"{label},", f"{{{label}}}"):
                name = name.replace(form, "")
            found[name] = float(value)
        return found

    def statistics(self) -> Statistics:
        return self.engine.statistics()


Serving = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture
def serving(sim_config: Callable[..., Config]) -> Serving:
    """``async with serving(model=..., engine=..., server=...) as client``.

    At its end nothing may be left: no lane taken, no request without its one answer.
    """

    @asynccontextmanager
    async def serve(
        observed_by: Callable[[Observer], Observer] = lambda following: following, **sections: Any
    ) -> AsyncIterator[Client]:
        config = sim_config(**sections)
        metrics = Metrics("sim", vllm_names=config.metrics.compat == "vllm")
        app = App(config, metrics)
        async with Engine.open(config, observer=observed_by(app.live), seed=7) as engine:
            app.served = serve_model(config, engine)
            metrics.watch(engine)
            app.live.watch(engine)
            yield Client(app, engine)
            await check_nothing_left(engine)

    return serve


async def check_nothing_left(engine: Engine) -> None:
    now = engine.statistics()
    if now.dead is not None:
        return
    if not now.draining:
        # Cancelled requests give their lanes back with the next iteration: this makes one.
        with contextlib.suppress(RequestError):
            async for _ in engine.generate([65], RequestParams(max_tokens=1)):
                pass
    await engine.drain(5)
    now = engine.statistics()
    assert (now.running, now.waiting) == (0, 0)
    assert now.accepted == now.finished + now.cancelled + now.failed
    assert now.lanes_free == now.lanes


@pytest.fixture
def script() -> Callable[..., list[int]]:
    """Token ids of a prompt that makes the simulated model answer with these tokens, then end.

    Strings stand for their bytes, which are tokens 0 to 255; numbers are ids (260 on: ``token``).
    """

    def make(*pieces: str | int) -> list[int]:
        tokens: list[int] = []
        for piece in pieces:
            tokens += piece.encode() if isinstance(piece, str) else [piece]
        return [258, *tokens, 259]

    return make


@pytest.fixture
def stalled_call() -> Callable[[bytes], Call]:
    """A request whose client sends so much and then nothing."""
    return lambda begun: Call([begun], stalls=True)


@pytest.fixture
def start(sim_model: Callable[..., Path], tmp_path: Path) -> Start:
    """``with start(model keys, server="keys in TOML", ...) as daemon``, as a process."""

    def run(
        model: dict[str, Any] | None = None,
        server: str = "",
        scheduler: str = "",
        engine: str = "lanes = 2",
    ) -> AbstractContextManager[Daemon]:
        path = tmp_path / "config.toml"
        path.write_text(
            f'[model]\npath = "{sim_model(**(model or {}))}"\nname = "sim"\n'
            f'[engine]\nlibrary = "sim"\n{engine}\n'
            f"[server]\nport = 0\n{server}\n[scheduler]\n{scheduler}\n"
        )
        return process_serving(path)

    return run


@pytest.fixture
def authority() -> trustme.CA:
    import trustme

    return trustme.CA()


@pytest.fixture
def certificate(authority: trustme.CA, tmp_path: Path) -> Callable[[], str]:
    """Writes a new certificate over the last one; returns the keys of [server] for it."""

    def write() -> str:
        issued = authority.issue_cert("127.0.0.1")
        key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
        issued.private_key_pem.write_to_path(str(key))
        cert.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        return f'tls_cert = "{cert}"\ntls_key = "{key}"'

    return write
