"""Every line in one form, and never a payload in it."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from pydantic import SecretStr

from relay.config import Log
from relay.errors import SinkUnavailable, SlotLost
from relay.event import Batch, Event, HeaderNames, Rejected, Transaction
from relay.log import configure
from relay.lsn import LSN

EVENT = Event(
    id=b"0197-id",
    topic="events.order.placed",
    key=b"customer-secret",
    header_names=HeaderNames.of(("trace",)),
    header_values=(b"header-secret",),
    body=b'{"card":"payload-secret"}',
    table="public.outbox_events",
    transaction=Transaction(7, 8, 9.0, b""),
    ordinal=0,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _undo() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.getLogger("relay").setLevel(logging.NOTSET)
    logging.captureWarnings(capture=False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_off_a_terminal_a_line_is_json_with_the_time_in_utc_first() -> None:
    out = io.StringIO()
    configure(Log(), out)
    structlog.get_logger("relay.source").info("slot.created", slot="outbox_relay", lsn=LSN(0x16B3748))
    (line,) = lines(out)
    assert list(line)[:3] == ["time", "level", "event"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", line["time"])
    assert line | {"time": ""} == {
        "time": "",
        "level": "info",
        "event": "slot.created",
        "slot": "outbox_relay",
        "lsn": "0/16B3748",
    }


def test_on_a_terminal_a_line_is_text_with_colour() -> None:
    out = Terminal()
    configure(Log(), out)
    structlog.get_logger().info("slot.created", lsn=LSN(0x16B3748))
    assert "slot.created" in out.getvalue()
    assert "0/16B3748" in out.getvalue()
    assert "\x1b[" in out.getvalue()


def test_the_form_can_be_forced() -> None:
    json_on_terminal, text_in_file = Terminal(), io.StringIO()
    configure(Log(format="json"), json_on_terminal)
    structlog.get_logger().info("relay.started")
    configure(Log(format="text"), text_in_file)
    structlog.get_logger().info("relay.started")
    assert lines(json_on_terminal)[0]["event"] == "relay.started"
    assert "relay.started" in text_in_file.getvalue()
    assert "\x1b[" not in text_in_file.getvalue()


def test_lines_go_to_stderr_unless_told(capsys: pytest.CaptureFixture[str]) -> None:
    configure(Log())
    structlog.get_logger().info("relay.started")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "relay.started" in captured.err


def test_the_level_is_obeyed_and_can_change_later() -> None:
    log, out = structlog.get_logger(), io.StringIO()
    configure(Log(level="warning"), out)
    log.info("relay.started")
    log.warning("sink.lost")
    configure(Log(level="debug"), out)
    log.debug("batch.published")
    assert [line["event"] for line in lines(out)] == ["sink.lost", "batch.published"]


def test_an_error_brings_its_class_and_its_hint() -> None:
    out = io.StringIO()
    configure(Log(), out)
    structlog.get_logger().error("relay.parked", error=SlotLost("the slot is gone", hint="run relay setup"))
    structlog.get_logger().warning("sink.lost", error=SinkUnavailable(""), hint="wait")
    first, second = lines(out)
    assert (first["error"], first["error_class"], first["hint"]) == ("the slot is gone", "SlotLost", "run relay setup")
    assert (second["error"], second["hint"]) == ("SinkUnavailable", "wait")


@pytest.mark.parametrize("form", ["json", "text"])
def test_payloads_keys_headers_and_secrets_never_appear(form: Any) -> None:
    out = io.StringIO()
    configure(Log(format=form), out)
    log = structlog.get_logger()
    log.info(
        "event.rejected",
        first=EVENT,
        rejected=[Rejected(EVENT, "too big")],
        batch=Batch([EVENT], LSN(8)),
        payload=EVENT.body,
        key=EVENT.key,
        headers=EVENT.headers(),
        dsn="postgresql://relay:dsn-secret@db/shop",
        nested={"password": "nested-secret", "body": EVENT.body},
        password=SecretStr("password-secret"),
        raw=b"payload-secret" * 10,
    )
    body = EVENT.body
    try:
        raise ValueError("no " + str(len(body or b"")))
    except ValueError:
        log.exception("relay.failed")
    assert "-secret" not in out.getvalue()
    assert "0197-id" in out.getvalue()
    assert "1 events up to 0/8" in out.getvalue()
    assert "ValueError: no 25" in out.getvalue()


def test_lines_of_libraries_come_in_the_same_form() -> None:
    out = io.StringIO()
    configure(Log(level="debug"), out)
    logging.getLogger("nats.aio").warning("lost %s", "127.0.0.1")
    (line,) = lines(out)
    assert (line["level"], line["event"], line["logger"]) == ("warning", "lost 127.0.0.1", "nats.aio")
    assert line["time"].endswith("Z")


def test_libraries_do_not_tell_their_debugging_details_even_when_we_do() -> None:
    out = io.StringIO()
    configure(Log(level="debug"), out)
    logging.getLogger("nats.aio").debug("published payload-secret")
    assert out.getvalue() == ""


def test_a_traceback_of_a_library_stays_on_one_line() -> None:
    out = io.StringIO()
    configure(Log(), out)
    try:
        raise OSError("gone")
    except OSError:
        logging.getLogger("asyncio").exception("callback failed")
    (line,) = lines(out)
    assert "OSError: gone" in line["exception"]


def test_warnings_become_lines() -> None:
    out = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure(Log(), out)
        warnings.warn("old name", DeprecationWarning, stacklevel=1)
    assert "old name" in lines(out)[0]["event"]


def test_what_is_bound_once_is_on_every_line() -> None:
    out = io.StringIO()
    configure(Log(), out)
    structlog.contextvars.bind_contextvars(relay="shop")
    structlog.get_logger().info("relay.started")
    assert lines(out)[0]["relay"] == "shop"


def test_odd_values_never_cost_the_line() -> None:
    out = io.StringIO()
    configure(Log(), out)
    structlog.get_logger().info(
        "relay.started", path=Path("/x"), big=2**70, surrogate="\ud800", data=b"\xff", kind=type, deep={1: {2: LSN(1)}}
    )
    (line,) = lines(out)
    assert line["event"] in ("relay.started", "'relay.started'")


def test_configuring_again_replaces_and_does_not_double() -> None:
    first, second = io.StringIO(), io.StringIO()
    configure(Log(), first)
    configure(Log(), second)
    structlog.get_logger().info("relay.started")
    assert first.getvalue() == ""
    assert len(lines(second)) == 1
    assert logging.getLogger().handlers[0].stream is second  # type: ignore[attr-defined]
    assert sys.stderr is not second
