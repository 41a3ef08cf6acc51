"""The daemon as a process: start, one-line failures, drain, exit codes (case 15)."""

from __future__ import annotations

import json
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from skippy_sched.cli import main
from tests.daemon_process import Start

#: A real clock, so that requests are under way when the signal comes.
SLOW = {"clock": "real", "cost_fixed_us": 5000}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_daemon_ends_at_once_and_cleanly(start: Start, number: signal.Signals) -> None:
    with start() as daemon:
        assert daemon.get("/health").read() == b'{"status":"ok"}'
        daemon.send_signal(number)
        assert daemon.exit_code() == 0
        assert daemon.log[-1]["event"] == "stopped"


def test_a_signal_loses_no_accepted_request(start: Start) -> None:
    """Three run or stream, more wait; all come to their end, then the daemon does."""
    with start(SLOW) as daemon:
        streams = [daemon.stream(max_tokens=400) for _ in range(2)]
        waiting = daemon.send(max_tokens=20)
        daemon.metrics_until('skippy:num_requests_waiting{model_name="sim"} 1.0')
        daemon.send_signal(signal.SIGTERM)
        daemon.wait_for("draining")

        assert daemon.get("/ready").status == 503
        assert daemon.get("/health").status == 200
        refused = daemon.ask()
        assert refused.status == 503
        assert refused.headers["retry-after"]
        assert refused.headers["connection"] == "close"
        assert json.loads(refused.read())["error"]["code"] == "draining"

        for stream in streams:
            text = stream.read()
            assert b'"finish_reason":"length"' in text
            assert text.endswith(b"data: [DONE]\n\n")
        answer = json.loads(daemon.answer(waiting).read())
        assert answer["usage"]["completion_tokens"] == 20
        assert daemon.exit_code() == 0
        assert daemon.log[-1]["cut"] == 0


def test_at_the_limit_what_still_runs_ends_with_an_error_event(start: Start) -> None:
    with start(SLOW, server="drain_timeout_s = 0.1") as daemon:
        stream = daemon.stream(max_tokens=2000)
        daemon.send_signal(signal.SIGTERM)
        *_, failure, done, _ = stream.read().decode().split("\n\n")
        assert json.loads(failure.removeprefix("data: "))["error"]["code"] == "draining"
        assert done == "data: [DONE]"
        assert daemon.exit_code() == 0
        assert daemon.log[-1]["cut"] == 1


def test_a_second_signal_stops_at_once(start: Start) -> None:
    with start(SLOW) as daemon:
        stream = daemon.stream(max_tokens=2000)
        daemon.send_signal(signal.SIGTERM)
        daemon.wait_for("draining")
        daemon.send_signal(signal.SIGTERM)
        assert b'"code":"draining"' in stream.read()
        assert daemon.exit_code() == 1


def test_a_second_signal_does_not_wait_for_a_native_call(start: Start) -> None:
    with start({"fault": "call=iteration nth=3 effect=hang"}) as daemon:
        daemon.stream(max_tokens=50)
        daemon.send_signal(signal.SIGINT)
        daemon.wait_for("draining")
        daemon.send_signal(signal.SIGINT)
        assert daemon.exit_code() == 1


def test_an_engine_that_hangs_answers_its_clients_and_ends_the_daemon(start: Start) -> None:
    model = {"fault": "call=iteration nth=3 effect=hang"}
    with start(model, scheduler="watchdog_s = 0.3") as daemon:
        stream = daemon.stream(max_tokens=50)
        assert b'"code":"engine_dead"' in stream.read()
        assert daemon.exit_code() == 70


def test_a_closed_socket_frees_the_lane(start: Start) -> None:
    """The server is told by the socket alone: writing to a gone client does not fail."""
    with start(SLOW) as daemon:
        for _ in range(3):
            stream = daemon.stream(max_tokens=2000)
            daemon.hang_up(stream)
        metrics = daemon.metrics_until(
            'skippy:requests_total{model_name="sim",outcome="cancelled"} 3'
        )
        assert 'skippy:num_requests_running{model_name="sim"} 0.0' in metrics
        assert 'skippy:lanes_free{model_name="sim"} 2.0' in metrics


def test_a_huge_body_is_refused_before_it_is_read(start: Start) -> None:
    with start() as daemon:
        connection = daemon.connect()
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(100 * 2**20))
        connection.putheader("expect", "100-continue")
        connection.endheaders()
        response = daemon.answer(connection)
        assert response.status == 413
        assert response.headers["connection"] == "close"
        assert json.loads(response.read())["error"]["code"] == "payload_too_large"
        assert daemon.get("/health").status == 200


def test_a_body_just_over_the_limit_is_answered_though_it_was_being_sent(start: Start) -> None:
    with start(server="body_limit_bytes = 2048") as daemon:
        response = daemon.ask(prompt="x" * 2**20)
        assert response.status == 413
        assert json.loads(response.read())["error"]["code"] == "payload_too_large"


def test_explain_prints_a_requests_story(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    with start() as daemon:
        request_id = json.loads(daemon.ask(max_tokens=7).read())["id"]
        url = f"http://127.0.0.1:{daemon.port}"
        assert main(["explain", request_id, "--url", url]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith(f"{request_id}: it ended after 7 tokens")
        assert "admitted" in printed
        assert main(["explain", request_id, "--url", url, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["completion_tokens"] == 7
        assert main(["explain", "cmpl-nothing", "--url", url]) == 69
        assert "no request 'cmpl-nothing'" in capsys.readouterr().err
    assert main(["explain", "x", "--url", url]) == 69
    assert "is it running?" in capsys.readouterr().err


def test_top_prints_once_where_there_is_no_terminal(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    with start() as daemon:
        daemon.ask(max_tokens=7).read()
        assert main(["top", "--url", f"http://127.0.0.1:{daemon.port}"]) == 0
        printed = capsys.readouterr().out
        assert printed.startswith("skippy-sched  sim  ready")
        assert "finished 1 " in printed


# --- failures at start: one line each, no traceback, a code of their own --------------------------


FailingStart = Callable[..., tuple[int, str]]


@pytest.fixture
def failing_start(capsys: pytest.CaptureFixture[str]) -> Iterator[FailingStart]:
    """Exit code and error line of a start that must fail, in this process to save time."""

    def start(*arguments: str) -> tuple[int, str]:
        code = main(["serve", "--port", "0", *arguments])
        lines = [line for line in capsys.readouterr().err.splitlines() if line[:1] != "{"]
        assert len(lines) == 1, lines
        assert lines[0].startswith("skippy-sched: error: ")
        return code, lines[0]

    handlers = logging.getLogger().handlers[:]
    yield start
    logging.getLogger().handlers[:] = handlers
    structlog.reset_defaults()


def test_a_port_in_use(failing_start: FailingStart) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, line = failing_start("--port", port, "--library", "sim", "--model", "x")
        assert code == 71
        assert port in line
        assert "in use" in line


def test_an_address_of_another_machine(failing_start: FailingStart) -> None:
    code, line = failing_start("--host", "192.0.2.1")
    assert code == 71
    assert "192.0.2.1" in line


@pytest.mark.parametrize("library", ["sim", "llama"])
def test_a_missing_model(failing_start: FailingStart, tmp_path: Path, library: str) -> None:
    missing = str(tmp_path / "missing.gguf")
    code, line = failing_start("--library", library, "--model", missing)
    assert code == 69
    assert missing in line


def test_a_model_that_is_no_model(failing_start: FailingStart, tmp_path: Path) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(bytes(range(256)) * 4096)
    code, line = failing_start("--library", "sim", "--model", str(path))
    assert code == 69
    assert str(path) in line


def test_a_library_that_is_none(
    failing_start: FailingStart, tmp_path: Path, sim_model: Callable[..., Path]
) -> None:
    library = tmp_path / "libother.so"
    library.write_bytes(b"not a library")
    for name in (str(library), str(tmp_path / "missing.so"), "nothing"):
        code, line = failing_start("--library", name, "--model", str(sim_model()))
        assert code == 69
        assert name in line


def test_a_library_of_another_abi(
    failing_start: FailingStart, tmp_path: Path, sim_model: Callable[..., Path]
) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[engine]\nlibrary = "sim"\nexpected_abi = "0.9.0"\n')
    code, line = failing_start("-c", str(config), "--model", str(sim_model()))
    assert code == 69
    assert "0.9.0" in line


def test_a_broken_chat_template(
    failing_start: FailingStart, sim_model: Callable[..., Path]
) -> None:
    model = str(sim_model(chat_template="{% for %}"))
    code, line = failing_start("--library", "sim", "--model", model)
    assert code == 69
    assert "chat template" in line


def test_a_broken_configuration(failing_start: FailingStart, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text("[engine]\nlanes = 0\n")
    code, line = failing_start("-c", str(config))
    assert code == 78
    assert f"{config}:2: engine.lanes: 0 is below 1" in line
