"""Connections within bounds: TLS, Unix sockets, too many, too slow in, too slow out (case 13)."""

from __future__ import annotations

import json
import signal
import socket
import ssl
from http.client import HTTPConnection, HTTPSConnection

import pytest

from skippy_sched.cli import main
from skippy_sched.config import ServerSection
from skippy_sched.errors import AddressUnavailable, ConfigError
from skippy_sched.remote import get
from skippy_sched.server.listener import is_local, listen, tls_context
from tests.daemon_process import Daemon, Start

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


def connect(daemon: Daemon) -> socket.socket:
    kind, _, path = daemon.url.partition(":")
    if kind != "unix":
        return socket.create_connection(("127.0.0.1", daemon.port), timeout=20)
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(20)
    client.connect(path)
    return client


def read_all(client: socket.socket) -> bytes:
    return b"".join(iter(lambda: client.recv(65536), b""))


def error_code(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"])


# --- TLS ------------------------------------------------------------------------------------------


def test_with_a_certificate_only_https_is_spoken(
    start: Start, certificate, authority, tmp_path, monkeypatch, capsys
) -> None:
    """Also to the commands that ask a daemon."""
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    with start(server=certificate()) as daemon:
        assert daemon.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        connection = HTTPSConnection("127.0.0.1", daemon.port, timeout=20, context=trusting)
        connection.request("GET", "/v1/models")
        assert connection.getresponse().status == 200
        connection.close()
        with connect(daemon) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b"HTTP" not in read_all(plain)
        assert main(["top", "--url", daemon.url]) == 69
        assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
        assert main(["top", "--url", daemon.url]) == 0


def test_certificates_that_cannot_be_used_are_told_with_their_file(
    certificate, authority, tmp_path
) -> None:
    certificate()
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    other = tmp_path / "other.pem"
    authority.issue_cert("x").private_key_pem.write_to_path(str(other))
    missing, noise = tmp_path / "missing.pem", tmp_path / "noise.pem"
    noise.write_text("no certificate")
    for pair, words in (
        ((missing, key), ("server.tls_cert", "missing.pem", "No such file")),
        ((cert, missing), ("server.tls_key", "missing.pem", "No such file")),
        ((noise, key), ("noise.pem", "PEM")),
        ((cert, other), ("other.pem", "not the certificate's")),
    ):
        section = ServerSection(tls_cert=str(pair[0]), tls_key=str(pair[1]))
        with pytest.raises(ConfigError) as caught:
            tls_context(section)
        assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_certificate_needs_its_key(tmp_path) -> None:
    with pytest.raises(ValueError, match="both tls_cert and tls_key"):
        ServerSection(tls_cert=str(tmp_path / "cert.pem"))


# --- Unix sockets ---------------------------------------------------------------------------------


def test_a_unix_socket_serves_those_who_may_use_it_and_goes_with_the_daemon(
    start: Start, tmp_path, capsys
) -> None:
    path = tmp_path / "skippy.sock"
    with start(server=f'unix_socket = "{path}"\nunix_socket_mode = "0600"') as daemon:
        assert daemon.url == f"unix:{path}"
        assert path.stat().st_mode & 0o777 == 0o600
        assert get(daemon.url, "/v1/models")["data"][0]["id"] == "sim"
        assert main(["top", "--url", daemon.url]) == 0
        assert "sim  ready" in capsys.readouterr().out
        assert main(["explain", "nothing", "--url", daemon.url]) == 69
        assert "no request 'nothing'" in capsys.readouterr().err
        daemon.send_signal(signal.SIGTERM)
        assert daemon.exit_code() == 0
    assert not path.exists()


def test_a_unix_socket_in_use_is_left_alone_and_an_abandoned_one_taken(tmp_path) -> None:
    path = tmp_path / "skippy.sock"
    section = ServerSection(unix_socket=str(path))
    first = listen(section)
    with pytest.raises(AddressUnavailable, match="it is in use"):
        listen(section)
    first.close()
    listen(section).close()
    path.unlink()
    path.write_text("something of value")
    with pytest.raises(AddressUnavailable, match="no socket"):
        listen(section)
    assert path.read_text() == "something of value"
    with pytest.raises(AddressUnavailable, match="No such file"):
        listen(ServerSection(unix_socket=str(tmp_path / "missing" / "skippy.sock")))


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("::1", True), ("0.0.0.0", False), ("::", False)]
)
def test_it_is_known_whether_others_reach_the_address(host: str, local: bool) -> None:
    """A daemon without keys warns of it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as bound:
        try:
            bound.bind((host, 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
        assert is_local(bound) is local


# --- too many -------------------------------------------------------------------------------------


def test_one_connection_too_many_is_told_so_but_for_health(start: Start) -> None:
    with start(server="connections_max = 2") as daemon:
        kept = [connect(daemon) for _ in range(2)]
        # Whoever was served is a connection for sure.
        for client in kept:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200")
        refused = daemon.ask()
        assert (refused.status, refused.headers["connection"]) == (503, "close")
        assert refused.headers["retry-after"]
        error = json.loads(refused.read())["error"]
        assert error["code"] == "too_many_connections"
        assert "2 connections" in error["message"]
        assert daemon.get("/health").status == 200
        assert daemon.get("/ready").status == 200
        assert 'skippy:connections{model_name="sim"}' in daemon.scrape().decode()
        for client in kept:
            client.close()
        daemon.close_connections()
        daemon.metrics_until('skippy:connections{model_name="sim"} 2.0')
        daemon.close_connections()
        assert daemon.ask().status == 200


# --- too slow in ----------------------------------------------------------------------------------


def test_a_head_that_does_not_come_is_not_waited_for(start: Start) -> None:
    """Nor one that comes drop by drop, on a new connection or on one that has been used."""
    with start(server="header_timeout_s = 0.3") as daemon:
        with connect(daemon) as silent:
            assert read_all(silent) == b""
        with connect(daemon) as slow:
            slow.sendall(HEAD)
            answer = read_all(slow)
            assert answer.startswith(b"HTTP/1.1 408 Request Timeout")
            assert error_code(answer) == "request_timeout"
        with connect(daemon) as used:
            used.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert used.recv(1000).startswith(b"HTTP/1.1 200")
            used.sendall(b"G")
            assert b"HTTP/1.1 408" in read_all(used)
        cut = 'skippy:connections_cut_total{model_name="sim",reason="request_timeout"} 2.0'
        assert cut in daemon.scrape().decode()


@pytest.mark.parametrize(
    "endless",
    [
        b"x-filler: " + b"x" * 1000,
        b"x-filler: y\r\n" * 100,
        b"transfer-encoding: chunked\r\n\r\n0\r\nx-trailer: " + b"x" * 1000,
        b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 1000,
    ],
    ids=["one header", "many headers", "a trailer", "a chunk's extension"],
)
def test_a_head_without_end_is_cut(start: Start, endless: bytes) -> None:
    """Whoever goes on sending may see a reset connection in place of the answer."""
    with start() as daemon, connect(daemon) as client:
        with pytest.raises(ConnectionError):
            client.sendall(HEAD + endless + endless[-13:] * 2_000_000)
        assert daemon.wait_for("connection_refused")["code"] == "head_too_large"
        assert daemon.ask().status == 200


def test_a_body_that_does_not_come_is_not_waited_for(start: Start) -> None:
    with start(server="body_timeout_s = 0.2") as daemon, connect(daemon) as client:
        client.sendall(HEAD + b'content-length: 1000\r\n\r\n{"prompt":')
        answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"server.body_timeout_s" in answer


def test_what_is_no_http_gets_the_error_object_too(start: Start) -> None:
    with start() as daemon, connect(daemon) as client:
        client.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 400 Bad Request")
        assert error_code(answer) == "bad_http"


# --- too slow out ---------------------------------------------------------------------------------


def test_a_client_that_does_not_read_is_cut_and_holds_up_nobody(start: Start, tmp_path) -> None:
    """A Unix socket holds less in the kernel than a TCP one."""
    server = f'unix_socket = "{tmp_path}/s.sock"\nwrite_timeout_s = 0.3'
    engine = "lanes = 2\ncontext_tokens = 16384"
    with start(server=server, engine=engine) as daemon, connect(daemon) as slow:
        body = json.dumps({"prompt": "x", "max_tokens": 16000, "stream": True, "ignore_eos": True})
        slow.sendall(HEAD + b"content-length: %d\r\n\r\n%s" % (len(body), body.encode()))
        assert slow.recv(100).startswith(b"HTTP/1.1 200")

        reader = HTTPConnection("localhost", timeout=20)
        reader.sock = connect(daemon)
        reader.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        assert reader.getresponse().read().endswith(b"data: [DONE]\n\n")
        reader.close()

        cut = daemon.wait_for("connection_cut")
        assert cut["reason"] == "slow_reader"
        assert cut["unread_bytes"] < 2**20
        while (ended := daemon.wait_for("request_ended"))["outcome"] != "cancelled":
            assert ended["completion_tokens"] == 16000
        assert cut["request_id"].removeprefix("req-") in ended["request_id"]
        assert ended["completion_tokens"] < 16000
        counts = get_text(daemon)
        assert 'connections_cut_total{model_name="sim",reason="slow_reader"} 1.0' in counts
        assert 'skippy:lanes_free{model_name="sim"} 2.0' in counts


def get_text(daemon: Daemon) -> str:
    with connect(daemon) as client:
        client.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        return read_all(client).decode()
