"""SIGHUP and SIGUSR1: what changes while the daemon serves, what does not, what is told."""

from __future__ import annotations

import json
import signal
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skippy_sched.config import RELOADABLE, Config
from skippy_sched.server.keys import hash_key
from skippy_sched.server.reload import merged
from tests.daemon_process import Daemon, Start

SLOW = {"clock": "real", "cost_fixed_us": 5000}


def rewrite(daemon: Daemon, *changes: tuple[str, str]) -> None:
    text = daemon.config.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    daemon.config.write_text(text)


def reload(daemon: Daemon, event: str = "reloaded") -> dict[str, Any]:
    daemon.send_signal(signal.SIGHUP)
    return daemon.wait_for(event)


def test_only_marked_keys_change_and_the_others_are_named() -> None:
    def config(**sections: dict[str, Any]) -> Config:
        return Config.model_validate(sections)

    running = config(server={"port": 1}, engine={"lanes": 2}, log={"level": "info"})
    wanted = config(
        server={"port": 2, "api_keys": ["x"], "write_timeout_s": 3.0},
        engine={"lanes": 4},
        log={"level": "error"},
    )
    config_, changed, refused = merged(running, wanted)
    assert changed == ["server.api_keys", "server.write_timeout_s", "log.level"]
    assert refused == ["engine.lanes", "server.port"]
    assert config_.server == wanted.server.model_copy(update={"port": 1})
    assert config_.engine == running.engine
    assert config_.log == wanted.log


def test_tls_cannot_be_turned_on_or_off_but_certificates_change() -> None:
    one, other = (
        Config.model_validate({"server": {"tls_cert": name, "tls_key": name}}) for name in "ab"
    )
    assert merged(one, other)[1:] == (["server.tls_cert", "server.tls_key"], [])
    assert merged(one, Config())[1:] == ([], ["server.tls_cert", "server.tls_key"])
    assert merged(Config(), one)[1:] == ([], ["server.tls_cert", "server.tls_key"])


def test_nothing_of_the_engine_or_the_model_is_marked() -> None:
    for section in (Config().model, Config().engine, Config().speculation):
        for key, info in type(section).model_fields.items():
            assert info.json_schema_extra != RELOADABLE, key


def test_keys_limits_and_level_change_and_what_runs_goes_on(start: Start, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("")
    server = f'keys_file = "{keys}"\nbody_limit_bytes = 100000'
    with start(SLOW, server=server, scheduler="waiting_requests_max = 5") as daemon:
        stream = daemon.stream(max_tokens=300)
        keys.write_text(f'[alice]\nhash = "{hash_key("a-key-of-some-length")}"\n')
        rewrite(
            daemon,
            ("lanes = 2", "lanes = 3"),
            ("body_limit_bytes = 100000", "body_limit_bytes = 2000"),
            ("waiting_requests_max = 5", "waiting_requests_max = 4"),
        )
        assert reload(daemon)["changed"] == [
            "scheduler.waiting_requests_max",
            "server.body_limit_bytes",
        ]
        assert daemon.wait_for("not_reloaded")["keys"] == ["engine.lanes"]
        assert daemon.ask().status == 401, "the keys file is read again, whatever else changed"
        headers = {"authorization": "Bearer a-key-of-some-length"}
        assert daemon.ask(headers=headers, max_tokens=1).status == 200
        assert daemon.ask(headers=headers, prompt="x" * 3000).status == 413
        text = stream.read()
        assert b'"finish_reason":"length"' in text

        rewrite(daemon, ("[scheduler]", '[log]\nlevel = "warning"\n[scheduler]'))
        daemon.send_signal(signal.SIGHUP)
        assert daemon.wait_for("not_reloaded")["keys"] == ["engine.lanes"]
        assert [line["event"] for line in daemon.log].count("reloaded") == 1


def test_the_queue_is_bounded_anew(start: Start) -> None:
    with start(SLOW, engine="lanes = 1", scheduler="waiting_requests_max = 1") as daemon:
        daemon.stream(max_tokens=1000)
        daemon.send(max_tokens=1)
        daemon.metrics_until('skippy:num_requests_waiting{model_name="sim"} 1.0')
        assert daemon.ask().status == 429
        rewrite(daemon, ("waiting_requests_max = 1", "waiting_requests_max = 2"))
        reload(daemon)
        daemon.send(max_tokens=1)
        daemon.metrics_until('skippy:num_requests_waiting{model_name="sim"} 2.0')


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("port = 0", "port = 0\nbody_limit_bytes = 1", "server.body_limit_bytes: 1 is below 1024"),
        ("port = 0", "port =", "not valid TOML"),
        ("port = 0", 'port = 0\nkeys_file = "/missing"', "server.keys_file"),
    ],
)
def test_a_broken_file_changes_nothing(start: Start, before: str, after: str, words: str) -> None:
    with start() as daemon:
        rewrite(daemon, (before, f'{after}\napi_keys = ["x"]'))
        problems = reload(daemon, "reload_failed")["problems"]
        assert words in problems[0]
        assert daemon.ask(max_tokens=1).status == 200


def test_new_connections_get_a_renewed_certificate(
    start: Start, certificate: Callable[[], str]
) -> None:
    with start(server=certificate()) as daemon:
        address = ("127.0.0.1", daemon.port)
        first = ssl.get_server_certificate(address)
        certificate()
        assert reload(daemon)["changed"] == []
        assert ssl.get_server_certificate(address) != first


def test_the_state_is_told_request_by_request_without_their_texts(start: Start) -> None:
    with start(SLOW, engine="lanes = 1") as daemon:
        daemon.stream(max_tokens=1000)
        daemon.send(prompt="a secret", max_tokens=7)
        daemon.metrics_until('skippy:num_requests_waiting{model_name="sim"} 1.0')
        daemon.send_signal(signal.SIGUSR1)
        state = daemon.wait_for("state")
        assert (state["state"], state["waiting"], state["decoding"]) == ("ready", 1, 1)
        running, waiting = (daemon.wait_for("request_state") for _ in range(2))
        assert running["state"] == "decode"
        assert (waiting["state"], waiting["queue_position"]) == ("waiting", 1)
        assert waiting["completion_tokens_max"] == 7
        assert "secret" not in json.dumps(daemon.log)
