"""The ASGI application: routes, keys, the served model's state, and errors as answers.

Pure ASGI: nothing here knows which server runs it.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from importlib.metadata import version

import structlog
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from skippy_sched import clock
from skippy_sched.config import Config
from skippy_sched.errors import RequestError
from skippy_sched.server import admin, endpoints, live_facts
from skippy_sched.server.exchange import Exchange
from skippy_sched.server.keys import Key, Keyring
from skippy_sched.server.live import Live
from skippy_sched.server.metrics import Metrics
from skippy_sched.server.openapi import openapi_document
from skippy_sched.server.page import Page
from skippy_sched.server.problems import (
    ClientGone,
    Loading,
    MethodNotAllowed,
    NotFound,
    TooManyConnections,
    UnsupportedMediaType,
    error_headers,
    error_object,
)
from skippy_sched.server.replies import DONE, Head, error_event
from skippy_sched.server.served_model import ServedModel
from skippy_sched.server.wire import ChatRequest, CompletionRequest, Generation, Request, parse

log = structlog.get_logger("skippy_sched.server")

#: Without an iteration for so long while requests wait or run, the engine is not making progress.
STALL_S = 30.0

#: Who watches the daemon must reach it when nobody else does.
ALWAYS_ANSWERED = ("/health", "/ready", "/metrics")

#: Unknown fields named in a header or in the log, at most: names come from clients.
IGNORED_SHOWN_MAX = 10
IGNORED_LOGGED_MAX = 100

_REQUEST_ID = re.compile(r"[\w.:-]{1,64}", re.ASCII)
_NOT_A_NAME = re.compile(r"[^\w.-]", re.ASCII)

Handler = Callable[[Exchange], Awaitable[None]]


class _Endpoint:
    """A handler as the ASGI application that a route wants."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(scope["skippy.exchange"])


class App:
    """``served`` is set once the model is loaded; ``is_draining`` once the daemon shuts down."""

    def __init__(
        self,
        config: Config,
        metrics: Metrics,
        keyring: Keyring | None = None,
        generator: random.Random | None = None,
    ) -> None:
        """Raises ConfigError when there is no keyring and the keys file is wrong."""
        self.served: ServedModel | None = None
        self.is_draining = False
        #: may be exchanged while it serves
        self.section = config.server
        #: the engine's observer, which hands everything on to the metrics
        self.live = Live(metrics)
        self.metrics = metrics
        self._page = Page()
        self._random = generator or clock.random_generator()
        self._keyring = keyring or Keyring(config.server)
        self._fingerprint = f"skippy-sched-{version('skippy-sched')}"
        self._ignored_logged: set[str] = set()
        self._document: dict[str, object] | None = None
        self._router = Router(
            [
                Route("/v1/completions", _Endpoint(self._completions), methods=["POST"]),
                Route("/v1/chat/completions", _Endpoint(self._chat), methods=["POST"]),
                Route("/v1/embeddings", _Endpoint(self._embeddings), methods=["POST"]),
                Route("/v1/models", _Endpoint(self._models), methods=["GET"]),
                Route("/v1/models/{name:path}", _Endpoint(self._model), methods=["GET"]),
                Route("/admin/requests", _Endpoint(self._requests), methods=["GET"]),
                Route("/admin/requests/{id}", _Endpoint(self._request), methods=["GET"]),
                Route("/admin/live", _Endpoint(self._live), methods=["GET"]),
                Route("/", _Endpoint(self._show_page), methods=["GET"]),
                Route("/page/{name}", _Endpoint(self._show_page), methods=["GET"]),
                Route("/health", _Endpoint(self._health), methods=["GET"]),
                Route("/ready", _Endpoint(self._ready), methods=["GET"]),
                Route("/metrics", _Endpoint(self._scrape), methods=["GET"]),
                Route("/openapi.json", _Endpoint(self._openapi), methods=["GET"]),
            ],
            redirect_slashes=False,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000, "reason": None})
            return
        assert scope["type"] == "http"
        exchange = Exchange(scope, receive, send)
        asked = exchange.header(b"x-request-id") or ""
        exchange.request_id = asked if _REQUEST_ID.fullmatch(asked) else self._new_id("req-")
        exchange.headers.append((b"x-request-id", exchange.request_id.encode()))
        scope["skippy.exchange"] = exchange
        scope["app"] = self  # so that the router raises its errors
        await self._handle(exchange, scope, receive, send)

    async def _handle(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if exchange.is_surplus and exchange.path not in ALWAYS_ANSWERED:
                raise TooManyConnections(
                    f"{self.section.connections_max} connections are open already "
                    "(server.connections_max); close some, or come back later"
                )
            await self._router(scope, receive, send)
        except ClientGone:
            return
        except RequestError as error:
            await self._refuse(exchange, error)
        except HTTPException as error:
            await self._refuse(exchange, _routing_error(scope, error))
        except Exception:
            # A bug of ours: the client gets its answer, the log the rest.
            log.exception("request_crashed", request_id=exchange.request_id, path=exchange.path)
            await self._refuse(exchange, RequestError("internal error; the server's log has more"))

    async def _refuse(self, exchange: Exchange, error: RequestError) -> None:
        """Answer with an error, whether or not the response has begun."""
        if exchange.status != 0:
            # The status of a stream is out: only an event can tell that this is no proper end.
            if not exchange.is_complete:
                await exchange.write(error_event(error).encode() + DONE)
                await exchange.end()
            return
        self.metrics.count_refusal(error)
        log.info(
            "request_refused",
            request_id=exchange.request_id,
            path=exchange.path[:200],
            status=error.http_status,
            code=error.code,
            param=error.param,
            message=error.message[:200],
            retry=exchange.header(b"x-stainless-retry-count"),
        )
        exchange.headers += error_headers(error)
        await exchange.answer_json(error.http_status, error_object(error))

    # --- generation -----------------------------------------------------------------------------

    async def _completions(self, exchange: Exchange) -> None:
        served, request = await self._accept(exchange, CompletionRequest)
        head = self._head(exchange, served, request, "cmpl-")
        await endpoints.completions(
            exchange, served, request, head, self.section.keep_alive_comment_s
        )

    async def _chat(self, exchange: Exchange) -> None:
        served, request = await self._accept(exchange, ChatRequest)
        head = self._head(exchange, served, request, "chatcmpl-")
        await endpoints.chat_completions(
            exchange, served, request, head, self.section.keep_alive_comment_s
        )

    async def _embeddings(self, exchange: Exchange) -> None:
        self._key(exchange)
        await endpoints.embeddings(exchange)

    async def _accept(self, exchange: Exchange, kind: type[Request]) -> tuple[ServedModel, Request]:
        """All checks that need no engine, cheapest first."""
        key = self._key(exchange)
        served = self._loaded()
        content_type = (exchange.header(b"content-type") or "application/json").lower()
        if content_type.partition(";")[0].strip() != "application/json":
            raise UnsupportedMediaType(
                f"the body must be application/json, not {content_type[:80]}"
            )
        if exchange.header(b"content-encoding") not in (None, "identity"):
            raise UnsupportedMediaType("compressed bodies are not supported")
        request = parse(kind, await self._body(exchange))
        endpoints.check_model(served, request.model)
        if request.ignored:
            self._tell_ignored(exchange, request.ignored)
        if key is not None:
            now = self._keyring.clock.now
            request = key.admit(request, now())
            exchange.charge = lambda tokens: key.charge(tokens, now())
        return served, request

    @property
    def _idle_s(self) -> float:
        return self.section.keep_alive_comment_s

    async def _body(self, exchange: Exchange) -> bytes:
        return await exchange.body(self.section.body_limit_bytes, self.section.body_timeout_s)

    def _tell_ignored(self, exchange: Exchange, fields: list[str]) -> None:
        names = [_NOT_A_NAME.sub("?", name[:40]) for name in fields[:IGNORED_SHOWN_MAX]]
        text = f'299 skippy-sched "unknown fields ignored: {", ".join(names)}"'
        exchange.headers.append((b"warning", text.encode()))
        new = set(names) - self._ignored_logged
        if new and len(self._ignored_logged) < IGNORED_LOGGED_MAX:
            self._ignored_logged |= new
            log.info("fields_ignored", fields=sorted(new), request_id=exchange.request_id)

    def _head(
        self, exchange: Exchange, served: ServedModel, request: Generation, prefix: str
    ) -> Head:
        """The answer's id is made of the request's, so that either leads to the other."""
        created = int(clock.wall_time())
        new_id = prefix + exchange.request_id.removeprefix("req-")
        if served.engine.requests.find(new_id) is not None:
            new_id = self._new_id(prefix)  # a client may use an id twice at a time
        return Head(new_id, created, served.name, self._fingerprint, request.tier_used)

    def _new_id(self, prefix: str) -> str:
        return f"{prefix}{self._random.getrandbits(96):024x}"

    def _loaded(self) -> ServedModel:
        if self.served is None:
            raise Loading("the model is still being loaded", retry_after_s=2)
        return self.served

    def _key(self, exchange: Exchange) -> Key | None:
        """Whose request it is; raises Unauthorized or Forbidden."""
        return self._keyring.user(exchange.header(b"authorization"))

    def _check_admin(self, exchange: Exchange) -> None:
        """Raises Unauthorized or Forbidden."""
        self._keyring.check_admin(exchange.header(b"authorization"), is_local=exchange.is_local)

    # --- for the operator ------------------------------------------------------------------------

    async def _requests(self, exchange: Exchange) -> None:
        self._check_admin(exchange)
        await admin.requests(exchange, self._loaded().engine.requests)

    async def _request(self, exchange: Exchange) -> None:
        self._check_admin(exchange)
        request_id: str = exchange.scope["path_params"]["id"]
        await admin.request(exchange, self._loaded().engine.requests, request_id)

    async def _live(self, exchange: Exchange) -> None:
        self._check_admin(exchange)
        await live_facts.live(exchange, self._loaded(), self.live, self.trouble())

    async def _show_page(self, exchange: Exchange) -> None:
        """Needs no key: the facts that it asks for do."""
        name: str = exchange.scope["path_params"].get("name", "index.html")
        await self._page.answer(exchange, name)

    # --- the rest -------------------------------------------------------------------------------

    async def _models(self, exchange: Exchange) -> None:
        self._key(exchange)
        await endpoints.models(exchange, self._loaded())

    async def _model(self, exchange: Exchange) -> None:
        self._key(exchange)
        name: str = exchange.scope["path_params"]["name"]
        await endpoints.model(exchange, self._loaded(), name)

    async def _health(self, exchange: Exchange) -> None:
        """The process lives; it says nothing of the engine."""
        await exchange.answer_json(HTTPStatus.OK, {"status": "ok"})

    async def _ready(self, exchange: Exchange) -> None:
        reason = self.trouble()
        if reason is None:
            await exchange.answer_json(HTTPStatus.OK, {"status": "ready"})
        else:
            body = {"status": "not ready", "reason": reason}
            await exchange.answer_json(HTTPStatus.SERVICE_UNAVAILABLE, body)

    def trouble(self) -> str | None:
        """Why requests had better go elsewhere; None when ready."""
        if self.is_draining:
            return "draining"
        if self.served is None:
            return "loading"
        now = self.served.engine.statistics()
        if now.dead is not None:
            return f"engine dead: {now.dead}"
        if now.draining:
            return "draining"
        age_s = now.last_iteration_age_s
        if now.running + now.waiting and age_s is not None and age_s > STALL_S:
            return f"no iteration ended for {age_s:.0f} s although requests wait"
        return None

    def makes_progress(self) -> bool:
        """False when restarting the process would help: loading and draining are progress."""
        return self.trouble() in (None, "loading", "draining")

    async def _openapi(self, exchange: Exchange) -> None:
        if self._document is None:
            # Reads the package's files and takes its time.
            self._document = await asyncio.to_thread(openapi_document)
        await exchange.answer_json(HTTPStatus.OK, self._document)

    async def _scrape(self, exchange: Exchange) -> None:
        content_type, text = self.metrics.exposition(exchange.header(b"accept") or "")
        await exchange.answer(HTTPStatus.OK, text, content_type.encode())


def _routing_error(scope: Scope, error: HTTPException) -> RequestError:
    method, path = scope["method"], scope["path"][:200]
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allow = (error.headers or {}).get("Allow", "")
        return MethodNotAllowed(f"{path} does not take {method}, only {allow}", allow)
    return NotFound(f"there is nothing at {method} {path}")
