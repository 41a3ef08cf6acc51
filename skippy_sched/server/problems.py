"""Errors as clients see them: status, headers and the error object.

RequestError
├── Unauthorized          no key, or a wrong one
├── Forbidden             the key has not the right
├── RateLimited           the key has used up its rate
├── NotFound              no such route
│   └── ModelNotFound     no such model
├── MethodNotAllowed      the route exists, the method does not
├── BadHttp               what came is no HTTP
├── HeadTimeout           the head came too slowly
├── HeadTooLarge          the head is over the limit
├── BodyTimeout           the body came too slowly
├── PayloadTooLarge       the body is over the limit
├── UnsupportedMediaType  the body is not JSON
├── TooManyConnections    more than the daemon keeps open
├── Loading               the model is not there yet
└── Cancelled             cancelled by someone other than its client
"""

from __future__ import annotations

import math

from skippy_sched.errors import ContextLengthExceeded, Draining, InvalidRequest, RequestError

#: Longer waits make clients give up; shorter ones make them hammer.
RETRY_AFTER_S_MAX = 120


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class Unauthorized(InvalidRequest):
    http_status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    http_status = 403
    type = "permission_error"


class RateLimited(RequestError):
    """``retry_after_s`` is exact: the time until the allowance is there."""

    http_status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    should_retry = True


class NotFound(RequestError):
    http_status = 404
    type = "not_found_error"


class ModelNotFound(InvalidRequest):
    http_status = 404
    code = "model_not_found"


class MethodNotAllowed(RequestError):
    http_status = 405
    type = "invalid_request_error"

    def __init__(self, message: str, allow: str) -> None:
        super().__init__(message)
        self.allow = allow


class BadHttp(RequestError):
    http_status = 400
    type = "invalid_request_error"
    code = "bad_http"


class HeadTimeout(RequestError):
    http_status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class HeadTooLarge(RequestError):
    http_status = 431
    type = "invalid_request_error"
    code = "head_too_large"


class BodyTimeout(RequestError):
    http_status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class PayloadTooLarge(InvalidRequest):
    http_status = 413
    code = "payload_too_large"

    def __init__(self, size: int | None, limit: int) -> None:
        found = "more" if size is None else f"{size} bytes"
        super().__init__(
            f"the body may have {limit} bytes (server.body_limit_bytes), this one has {found}"
        )


class UnsupportedMediaType(RequestError):
    http_status = 415
    type = "invalid_request_error"


class TooManyConnections(RequestError):
    http_status = 503
    code = "too_many_connections"
    should_retry = True


class Loading(RequestError):
    http_status = 503
    code = "loading"
    should_retry = True


class Cancelled(RequestError):
    code = "cancelled"


def error_object(error: RequestError) -> dict[str, object]:
    fields: dict[str, object] = {
        "message": error.message,
        "type": error.type,
        "param": error.param,
        "code": error.code,
    }
    if isinstance(error, ContextLengthExceeded):
        fields["n_prompt_tokens"] = error.prompt_tokens
        fields["n_ctx"] = error.context_tokens
    return {"error": fields}


def error_headers(error: RequestError) -> list[tuple[bytes, bytes]]:
    headers = []
    if error.http_status >= 500 or error.http_status in (408, 429):
        headers.append((b"x-should-retry", b"true" if error.should_retry else b"false"))
    retry_after_s = error.retry_after_s
    if retry_after_s is None and error.should_retry:
        retry_after_s = 1
    if retry_after_s is not None:
        seconds = min(max(math.ceil(retry_after_s), 1), RETRY_AFTER_S_MAX)
        headers.append((b"retry-after", b"%d" % seconds))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allow.encode("latin-1")))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, Draining | PayloadTooLarge | BodyTimeout | TooManyConnections):
        headers.append((b"connection", b"close"))
    return headers
