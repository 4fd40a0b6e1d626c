"""Logging: one form for every line, ours and the libraries'. Never a payload, a key, a header or a secret.

    log = structlog.get_logger(__name__)
    log.info("slot.created", slot=name, lsn=lsn)          the event is noun.past_verb, a constant; values are keys
    log.warning("sink.lost", error=exc, wait_seconds=2)   an exception under `error` brings its class and its hint

INFO is a change of state, plus `relay.progress` every 30 seconds; WARNING is something the relay cures by itself;
ERROR needs a person and says what to do under `hint`; DEBUG has a line per batch at most. None per event, ever.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any, TextIO

import orjson

from relay.lean import without

with without("rich"):  # for pretty tracebacks, which we never print: a tenth of the time to the first event
    import structlog
    from structlog.typing import EventDict, Processor, WrappedLogger

from relay.config import Log
from relay.errors import RelayError
from relay.event import Batch, Event, Rejected
from relay.lsn import LSN

PROGRESS_INTERVAL = 30.0
"""Seconds between two `relay.progress` lines."""

_WITHHELD = frozenset({"body", "dsn", "header_values", "headers", "key", "password", "payload", "row", "token"})
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def configure(log: Log, stream: TextIO | None = None) -> None:
    """Send every line to `stream` (stderr unless told; the daemon passes stdout), as JSON, or as text on a terminal."""
    out = sys.stderr if stream is None else stream
    terminal = out.isatty()
    text = log.format == "text" or (log.format == "auto" and terminal)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        _plain,
    ]
    # The plain traceback: the pretty ones print local variables, and with them payloads.
    rendering: list[Processor] = (
        [
            structlog.dev.ConsoleRenderer(
                colors=terminal, timestamp_key="time", exception_formatter=structlog.dev.plain_traceback
            )
        ]
        if text
        else [structlog.processors.format_exc_info, _json]
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *shared],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *rendering],
        )
    )
    level = _LEVELS[log.level]
    root = logging.getLogger()
    root.handlers[:] = [handler]
    # Libraries tell their own debugging details, payloads included: they speak only when something is wrong.
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger("relay").setLevel(level)
    logging.getLogger("psycopg").setLevel(logging.ERROR)  # it warns of what we are told anyway, by its exceptions
    logging.captureWarnings(capture=True)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=_OurLoggers(),
        cache_logger_on_first_use=False,  # else a later configure, and the tests' capture_logs, would come too late
    )


class _OurLoggers:
    """All our lines go through the logger `relay`, whatever name the caller gave: its level is ours to set."""

    def __call__(self, *_names: Any) -> WrappedLogger:
        return logging.getLogger("relay")


def _plain(_logger: WrappedLogger, _method: str, line: EventDict) -> EventDict:
    """Exceptions become `error`, `error_class` and `hint`; our values print as Postgres prints them; secrets do not."""
    error = line.get("error")
    if isinstance(error, BaseException):
        line["error"] = str(error) or type(error).__name__
        line["error_class"] = type(error).__name__
        if isinstance(error, RelayError) and error.hint:
            line.setdefault("hint", error.hint)
    for name, value in line.items():
        if name in _WITHHELD:
            line[name] = "(withheld)"
        elif not isinstance(value, str) and not name.startswith("_") and name != "exc_info":
            line[name] = _shown(value)
    return line


def _shown(value: Any) -> Any:
    match value:
        case LSN():
            return str(value)
        case bool() | int() | float() | None:
            return value
        case Event():
            return _shown(value.id)
        case Rejected():
            return _shown(value.event.id)
        case Batch():
            return f"{value.count} events up to {value.end_lsn}"
        case bytes():  # ids are short; whatever is long is not an id
            return value.decode(errors="replace") if len(value) <= 64 else f"({len(value)} bytes)"
        case Mapping():
            return {str(name): "(withheld)" if name in _WITHHELD else _shown(each) for name, each in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_shown(each) for each in value]
    return str(value)


def _json(_logger: WrappedLogger, _method: str, line: EventDict) -> str:
    ordered = {name: line.pop(name) for name in ("time", "level", "event") if name in line}
    # Text that is not Unicode (a lone surrogate in a path) must not cost us the line.
    try:
        return orjson.dumps({**ordered, **line}, default=str).decode()
    except TypeError:
        return orjson.dumps({str(k): ascii(v) for k, v in {**ordered, **line}.items()}).decode()
