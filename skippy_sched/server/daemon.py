"""The daemon's life: listen, load, serve, drain, end with a code that tells how it went.

Knows signals, sockets and uvicorn. Does not know what is served: the app does.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING

import structlog
import uvicorn
import uvloop

from skippy_sched import logs
from skippy_sched.config import Config
from skippy_sched.default_model import Progress, with_model_path
from skippy_sched.errors import ConfigError, RequestError, StartupError
from skippy_sched.scheduler.engine import Engine
from skippy_sched.scheduler.observe import Observer
from skippy_sched.scheduler.request import RequestParams
from skippy_sched.server import admin
from skippy_sched.server.app import App
from skippy_sched.server.connection import Bounds, Connection
from skippy_sched.server.keys import Keyring
from skippy_sched.server.listener import (
    BACKLOG,
    is_local,
    listen,
    load_certificate,
    make_room,
    remove,
    tls_context,
)
from skippy_sched.server.listener import url as listener_url
from skippy_sched.server.metrics import Metrics
from skippy_sched.server.receipts import Receipts
from skippy_sched.server.reload import merged
from skippy_sched.server.served_model import model_name, serve_model
from skippy_sched.server.systemd import Notifier
from skippy_sched.server.wakeup import run_promptly

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

log = structlog.get_logger("skippy_sched.daemon")

#: Longer than clients keep unused connections, so that it is they who close them.
KEEP_ALIVE_S = 75
#: What readers get to take the last bytes after their requests have ended.
LAST_BYTES_S = 5
#: A native call cannot be interrupted; past this the process ends around it.
STOP_NOW_S = 0.8
STOP_LOADING_S = 1.0
#: Every client has its answer as soon as the engine is dead; this is for the bytes to leave.
DEATH_S = 2.0


class ExitCode(IntEnum):
    """StartupError and ConfigError bring their own (69, 71, 78)."""

    CLEAN = 0
    STOPPED_AT_ONCE = 1
    ENGINE_DIED = 70


def serve(config: Config, reread: Callable[[], Config], progress: Progress | None = None) -> int:
    """Run the daemon to its end and return its exit code; raises StartupError.

    ``reread`` makes the configuration anew, for SIGHUP; it may raise ConfigError.
    """
    listener = listen(config.server)
    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(Daemon(config, reread, listener, progress).run())
        finally:
            remove(config.server)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the daemon's."""
        yield


class Daemon:
    """One run, from a listening socket to an exit code."""

    def __init__(
        self,
        config: Config,
        reread: Callable[[], Config],
        listener: socket.socket,
        progress: Progress | None,
    ) -> None:
        self._config = config
        self._reread = reread
        self._listener = listener
        self._progress = progress
        self._metrics = Metrics(model_name(config), vllm_names=config.metrics.compat == "vllm")
        self._keyring = Keyring(config.server)
        self._app = App(config, self._metrics, self._keyring)
        self._tracing = _tracing(config)
        self._tls = tls_context(config.server)
        room = make_room(config.server.connections_max)
        self._bounds = Bounds(config.server, room, self._metrics.count_cut)
        self._server = _Server(self._uvicorn_config())
        self._metrics.watch_connections(lambda: len(self._server.server_state.connections))
        self._systemd = Notifier(os.environ)
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._reload_asked = asyncio.Event()
        #: the same as ``_stop``, for threads
        self._stop_loading = threading.Event()
        self._cut = 0

    def _uvicorn_config(self) -> uvicorn.Config:
        config = uvicorn.Config(
            self._app,
            http=partial(Connection, self._bounds),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=LAST_BYTES_S,
        )
        config.load()
        config.ssl = self._tls
        return config

    async def run(self) -> int:
        """Raises StartupError."""
        run_promptly()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload_asked.set)
        loop.add_signal_handler(signal.SIGUSR1, self._log_state)
        failure: StartupError | None = None
        code: int = ExitCode.CLEAN
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._server.serve(sockets=[self._listener]), name="http")
            probe = tasks.create_task(self._metrics.probe_lag(), name="lag-probe")
            sampling = tasks.create_task(self._app.live.keep_sampling(), name="live-samples")
            watch = tasks.create_task(self._systemd.watch(self._app.makes_progress))
            try:
                code = await self._serve_model()
            except StartupError as error:
                failure = error
            finally:
                probe.cancel()
                sampling.cancel()
                watch.cancel()
                self._server.should_exit = True
                if self._tracing is not None:
                    await asyncio.to_thread(self._tracing.shutdown)
        if failure is not None and not self._stop.is_set():
            raise failure
        log.info("stopped", exit_code=int(code), cut=self._cut)
        return code

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self._stop.is_set():
            log.warning("stopping_at_once", signal=name)
            self._stop_now.set()
            self._server.force_exit = True
            _exit_within(STOP_NOW_S, ExitCode.STOPPED_AT_ONCE)
            return
        log.info("stopping", signal=name, hint="a second signal stops at once")
        self._systemd.stopping()
        self._stop.set()
        self._stop_loading.set()
        self._app.is_draining = True
        if self._app.served is None:
            _exit_within(STOP_LOADING_S, ExitCode.CLEAN)

    # --- the model's part -----------------------------------------------------------------------

    async def _serve_model(self) -> int:
        config = await asyncio.to_thread(
            with_model_path, self._config, self._progress, self._stop_loading
        )
        log.info("loading", model=config.model.path, library=config.engine.library)
        observer: Observer = Receipts(self._app.live)
        if self._tracing is not None:
            from skippy_sched.server.traces import Traces

            tracer = self._tracing.get_tracer("skippy-sched")
            observer = Traces(observer, tracer, model_name(config))
        async with Engine.open(config, observer=observer) as engine:
            self._app.served = serve_model(config, engine)
            self._metrics.watch(engine)
            self._app.live.watch(engine)
            # What is there from now on to the end is never walked again: a full collection would
            # hold the event loop for some 30 ms.
            gc.freeze()
            if self._systemd.is_wanted and await _computes(engine):
                self._systemd.ready(f"serving {self._app.served.name}")
            self._announce(engine)
            return await self._until_end(engine)

    def _announce(self, engine: Engine) -> None:
        url = listener_url(self._listener, self._config.server)
        assert self._app.served is not None
        name = self._app.served.name
        log.info(
            "serving",
            url=url,
            model=name,
            lanes=engine.facts.lane_count,
            context_tokens=engine.context_tokens,
        )
        self._warn_if_open()
        if sys.stderr.isatty():
            sys.stderr.write(
                f"try:  curl -N {_for_curl(url)}/v1/chat/completions "
                "-H 'content-type: application/json' -d "
                """'{"stream": true, "messages": [{"role": "user", "content": "Hello!"}]}'\n"""
            )

    def _warn_if_open(self) -> None:
        if self._keyring.is_open and not is_local(self._listener):
            log.warning(
                "open_to_all",
                hint="anyone who reaches this address can use it; set server.api_keys",
            )

    async def _until_end(self, engine: Engine) -> int:
        """Serve until a signal or the engine's death; then let what runs come to its end."""
        async with asyncio.TaskGroup() as tasks:
            reloads = tasks.create_task(self._reload_when_asked(engine), name="reloads")
            died = tasks.create_task(engine.died(), name="death-watch")
            stopped = tasks.create_task(self._stop.wait(), name="stop-watch")
            await asyncio.wait({died, stopped}, return_when=asyncio.FIRST_COMPLETED)
            died.cancel()
            stopped.cancel()
            reloads.cancel()
        if (reason := engine.statistics().dead) is not None:
            log.error("ending", reason=reason, exit_code=int(ExitCode.ENGINE_DIED))
            _exit_within(DEATH_S, ExitCode.ENGINE_DIED)
            return ExitCode.ENGINE_DIED
        await self._drain(engine)
        return ExitCode.STOPPED_AT_ONCE if self._stop_now.is_set() else ExitCode.CLEAN

    async def _drain(self, engine: Engine) -> None:
        now = engine.statistics()
        limit_s = self._config.server.drain_timeout_s
        log.info("draining", running=now.running, waiting=now.waiting, limit_s=limit_s)
        async with asyncio.TaskGroup() as tasks:
            hurry = tasks.create_task(self._cut_on_second_signal(engine), name="hurry")
            self._cut += await engine.drain(limit_s)
            hurry.cancel()
        if self._cut:
            log.warning("drained", cut=self._cut, hint="these requests ended with an error")

    async def _cut_on_second_signal(self, engine: Engine) -> None:
        await self._stop_now.wait()
        self._cut += await engine.drain(0)

    # --- while it serves --------------------------------------------------------------------------

    async def _reload_when_asked(self, engine: Engine) -> None:
        """Runs until cancelled; one asked for while the model was loaded comes first."""
        while True:
            await self._reload_asked.wait()
            self._reload_asked.clear()
            with self._systemd.reloading():
                await self._reload(engine)

    async def _reload(self, engine: Engine) -> None:
        """All that can change changes, or, if anything is wrong, nothing."""
        try:
            wanted = await asyncio.to_thread(self._reread)
            config, changed, refused = merged(self._config, wanted)
            Keyring(config.server)  # before anything is changed
            if self._tls is not None:
                load_certificate(self._tls, config.server)
            self._keyring.load(config.server)
        except ConfigError as error:
            log.error(
                "reload_failed",
                problems=str(error).splitlines(),
                hint="all stays as it was; correct this and send SIGHUP again",
            )
            return
        self._config = config
        self._app.section = self._bounds.section = config.server
        if "server.connections_max" in changed:
            self._bounds.connections_max = make_room(config.server.connections_max)
        queue = config.scheduler
        engine.limit_queue(queue.waiting_requests_max, queue.waiting_tokens_max)
        if "log.level" in changed:
            logs.configure(config.log)
        log.info("reloaded", changed=changed)
        self._warn_if_open()
        if refused:
            log.warning("not_reloaded", keys=refused, hint="start the daemon anew to change these")

    def _log_state(self) -> None:
        if self._app.served is None:
            log.warning("state", state="loading")
        else:
            admin.log_state(self._app.served.engine, self._app.trouble())


async def _computes(engine: Engine) -> bool:
    """Whether one token can be had: who waits for readiness wants an engine that computes."""
    try:
        async for _ in engine.generate([0], RequestParams(max_tokens=1), request_id="readiness"):
            pass
    except RequestError as error:
        log.error("first_iteration_failed", error=error.message)
        return False
    return True


def _tracing(config: Config) -> TracerProvider | None:
    """Raises ConfigError where the SDK is missing."""
    endpoint = config.tracing.otlp_endpoint
    if endpoint is None:
        return None
    try:
        from skippy_sched.server.traces import provider_to
    except ImportError as error:
        raise ConfigError(
            f"tracing.otlp_endpoint needs the package {error.name}: "
            "install skippy-sched with its extra otel, or unset it"
        ) from None
    return provider_to(endpoint)


def _exit_within(seconds: float, code: ExitCode) -> None:
    """End the process at the latest then, whatever native call is under way."""
    timer = threading.Timer(seconds, os._exit, args=(int(code),))
    timer.daemon = True
    timer.start()


def _for_curl(url: str) -> str:
    scheme, _, path = url.partition(":")
    return f"--unix-socket {path} http://localhost" if scheme == "unix" else url
