"""Asks a running daemon: one GET, its JSON, and its refusals in one line.

Knows HTTP as a client. The key is taken from the environment, so that it is in no process list.
"""

from __future__ import annotations

import json
import os
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from skippy_sched.errors import RemoteError

KEY_VARIABLE = "SKIPPY_SCHED_KEY"
#: The daemon answers these from its books; longer means that it does not answer at all.
TIMEOUT_S = 10.0


def get(url: str, path: str) -> Any:
    """The JSON at ``path`` of the daemon at ``url``; raises RemoteError."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise RemoteError(f"{url!r} is not a URL such as http://127.0.0.1:8080")
    request = Request(url.rstrip("/") + path)
    if key := os.environ.get(KEY_VARIABLE):
        request.add_header("authorization", f"Bearer {key}")
    try:
        with urlopen(request, timeout=TIMEOUT_S) as response:
            return json.loads(response.read())
    except HTTPError as error:
        with error:
            raise RemoteError(_refusal(error, url)) from None
    except (URLError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise RemoteError(f"no daemon answers at {url}: {reason}; is it running?") from None
    except ValueError:
        raise RemoteError(f"what answers at {url} is not skippy-sched") from None


def _refusal(error: HTTPError, url: str) -> str:
    try:
        message = str(json.loads(error.read())["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"what answers at {url} is not skippy-sched (status {error.code})"
    if error.code in (401, 403):
        message += f"; give a key in {KEY_VARIABLE}"
    return message
