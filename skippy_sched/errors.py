"""The errors that a user of the library or a client of the daemon can meet.

SkippySchedError
├── ConfigError              the TOML file, an environment variable or a flag is wrong
├── SplitError               a model cannot be split, or a split one not be read
├── RemoteError              a running daemon cannot be asked, or refuses to answer
├── StartupError             the native library or the model cannot be had
│   └── AddressUnavailable   the daemon cannot listen where it should
└── RequestError             one request ends without a result
    ├── InvalidRequest       the request itself is wrong
    │   └── ContextLengthExceeded
    ├── QueueFull            the waiting queue has no room
    ├── Draining             the engine takes no new requests
    ├── DeadlineExceeded     the request's deadline passed
    ├── EngineFailure        the native layer failed on this request
    └── EngineDead           the engine stopped; nothing can run

Errors of the native boundary are in ``skippy_sched.native.errors``; they arrive here as causes.
Each RequestError class carries the OpenAI ``type`` and ``code`` and the HTTP status, so that a
server maps errors by lookup.
"""

from __future__ import annotations

from typing import ClassVar


class SkippySchedError(Exception):
    """Root of everything raised on purpose by this package above the native boundary."""

    #: what a command that ends with this error exits with
    exit_code: ClassVar[int] = 1


class ConfigError(SkippySchedError):
    """Configuration was refused; the message has one line per problem."""

    exit_code = 78


class SplitError(SkippySchedError):
    """A model cannot be split with exact results, or what a split has left is not whole."""

    exit_code = 65


class StartupError(SkippySchedError):
    """The engine or the daemon could not start; the message says what to do."""

    exit_code = 69


class RemoteError(SkippySchedError):
    """A running daemon was asked and did not answer as hoped."""

    exit_code = 69


class AddressUnavailable(StartupError):
    """The address is in use, not ours, or not known."""

    exit_code = 71


class RequestError(SkippySchedError):
    """One request ended without a result."""

    http_status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    should_retry: ClassVar[bool] = False

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    """The request is malformed or out of bounds; sending it again cannot help."""

    http_status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """Prompt, or prompt and max_tokens together, exceed what one request may hold."""

    code = "context_length_exceeded"

    def __init__(
        self, message: str, *, prompt_tokens: int, context_tokens: int, param: str = "prompt"
    ) -> None:
        super().__init__(message, param=param)
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens


class QueueFull(RequestError):
    """The bounded waiting queue has no room for this request."""

    http_status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"
    should_retry = True


class Draining(RequestError):
    """The engine finishes what it has and takes nothing new."""

    http_status = 503
    code = "draining"
    should_retry = True


class DeadlineExceeded(RequestError):
    """The request's deadline passed before it produced anything."""

    http_status = 504
    type = "timeout_error"
    code = "deadline_exceeded"


class EngineFailure(RequestError):
    """The native layer failed on this request; the same request would likely fail again."""

    code = "engine_error"


class EngineDead(RequestError):
    """The engine stopped for good; requests end here until it is started again."""

    http_status = 503
    code = "engine_dead"
    should_retry = True
