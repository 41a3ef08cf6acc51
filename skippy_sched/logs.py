"""Logging to standard error: key=value for people on a terminal, JSON lines otherwise.

Also takes in what other libraries say through ``logging``. Prompts and keys are never logged.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.typing import Processor

from skippy_sched.config import LogSection


def configure(section: LogSection, stream: TextIO | None = None) -> None:
    """Set up structlog and ``logging`` for the whole process."""
    stream = stream or sys.stderr
    pretty = section.format == "console" or (section.format == "auto" and stream.isatty())
    level = logging.getLevelNamesMapping()[section.level.upper()]
    structlog.configure(
        processors=_processors(pretty, stream.isatty()),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    # What libraries call information (each connection, each start) is debugging to our users.
    logging.basicConfig(
        level=logging.DEBUG if level == logging.DEBUG else logging.WARNING,
        handlers=[_Forward()],
        force=True,
    )


def _processors(pretty: bool, colours: bool) -> list[Processor]:
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
    ]
    if pretty:
        return [
            *shared,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(
                colors=colours, exception_formatter=structlog.dev.plain_traceback
            ),
        ]
    return [
        *shared,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.dict_tracebacks,
        structlog.processors.JSONRenderer(),
    ]


class _Forward(logging.Handler):
    """Hands records of ``logging`` to structlog, under their logger's name."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger()
        log.log(
            record.levelno,
            record.getMessage(),
            logger=record.name,
            exc_info=record.exc_info or None,
        )
