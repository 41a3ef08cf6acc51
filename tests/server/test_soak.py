"""Memory over thousands of requests (case 40)."""

from __future__ import annotations

import json
import threading
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.daemon_process import Daemon, Start


def resident_bytes(daemon: Daemon) -> int:
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) * 1024


def ask(connection: HTTPConnection, times: int) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 4, "temperature": 0})
    headers = {"content-type": "application/json"}
    for _ in range(times):
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        assert response.status == 200
        response.read()


@pytest.mark.timeout(180)
def test_memory_stays_flat_over_5000_requests(start: Start) -> None:
    """After 5,000 requests it is within 5 % of what it was after 500."""
    with start() as daemon:
        threading.Thread(target=daemon.process.stderr.read, daemon=True).start()
        connection = daemon.connect()
        ask(connection, 500)
        early = resident_bytes(daemon)
        ask(connection, 4500)
        late = resident_bytes(daemon)
        assert late <= early * 1.05, f"{early / 2**20:.1f} MiB became {late / 2**20:.1f} MiB"
        metrics = daemon.scrape().decode()
        assert 'requests_total{model_name="sim",outcome="finished"} 5000' in metrics
