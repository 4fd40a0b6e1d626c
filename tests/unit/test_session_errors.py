"""psycopg's errors become ours, once: what is retried, what stands by, what needs a person."""

from __future__ import annotations

import psycopg
import pytest
from psycopg import errors

from relay.config import Database
from relay.errors import (
    AuthError,
    ContractError,
    OperatorError,
    RelayError,
    SetupError,
    SlotBusy,
    SlotLost,
    SourceUnavailable,
    TransientError,
)
from relay.source.session import LASTING, PINNED, options_of, translate, translated


def of_state(state: str, text: str = "something") -> psycopg.Error:
    """The exception that psycopg raises for this SQLSTATE; states that it does not know get their base class."""
    kind: type[psycopg.Error]
    try:
        kind = errors.lookup(state)
    except KeyError:
        kind = psycopg.DatabaseError
    exc = kind(text)
    exc.sqlstate = state
    return exc


@pytest.mark.parametrize(
    ("state", "text", "expected"),
    [
        # Postgres goes away, or is not there yet (G11: any session may hear it first).
        ("57P01", "terminating connection due to administrator command", SourceUnavailable),
        ("57P02", "terminating connection because of crash of another server process", SourceUnavailable),
        ("57P03", "the database system is starting up", SourceUnavailable),
        ("57P05", "terminating connection due to idle-session timeout", SourceUnavailable),
        ("25P03", "terminating connection due to idle-in-transaction timeout", SourceUnavailable),
        ("57014", "canceling statement due to statement timeout", SourceUnavailable),
        ("08006", "connection failure", SourceUnavailable),
        ("08P01", "protocol violation", SourceUnavailable),
        ("53300", "sorry, too many clients already", SourceUnavailable),
        ("40001", "could not serialize access", SourceUnavailable),
        ("40P01", "deadlock detected", SourceUnavailable),
        ("55P03", "canceling statement due to lock timeout", SourceUnavailable),
        # The slot.
        ("55006", 'replication slot "outbox_relay" is active for PID 1', SlotBusy),
        ("42704", 'replication slot "outbox_relay" does not exist', SlotLost),
        ("55000", 'can no longer get changes from replication slot "outbox_relay"', SlotLost),
        ("55000", "This slot has been invalidated because it exceeded the maximum reserved size.", SlotLost),
        ("42704", 'publication "outbox_relay" does not exist', SlotLost),
        # Rights.
        ("28P01", 'password authentication failed for user "relay"', AuthError),
        ("28000", "no pg_hba.conf entry for replication connection", AuthError),
        ("42501", "permission denied for table outbox_events", AuthError),
        # What was not set up.
        ("42501", 'output plugin "wal2json" is not allowed', SetupError),
        ("3D000", 'database "shop" does not exist', SetupError),
        ("55000", 'logical decoding requires "wal_level" >= "logical"', SetupError),
        ("42P01", 'relation "outbox_relay_checkpoint" does not exist', SetupError),
        ("42703", 'column "xid" does not exist', ContractError),
        # Nobody listed it: never retried as if it were harmless.
        ("XX000", "internal error", SetupError),
        ("22P02", "invalid input syntax for type pg_snapshot", SetupError),
    ],
)
def test_states(state: str, text: str, expected: type[RelayError]) -> None:
    found = translate(of_state(state, text))
    assert type(found) is expected
    assert text in str(found)
    if isinstance(found, OperatorError):
        assert found.hint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('connection to server at "127.0.0.1", port 5432 failed: Connection refused', SourceUnavailable),
        ("connection timeout expired", SourceUnavailable),
        ("server closed the connection unexpectedly", SourceUnavailable),
        ("consuming input failed: SSL SYSCALL error: EOF detected", SourceUnavailable),
        ('FATAL:  password authentication failed for user "relay"', AuthError),
        ("fe_sendauth: no password supplied", AuthError),
        ("SSL error: certificate verify failed", AuthError),
        ("SSL error: tlsv1 alert unknown ca", AuthError),
        ('private key file "relay.key" has group or world access', AuthError),
        ("server does not support SSL, but SSL was required", AuthError),
        ('FATAL:  role "relay" does not exist', AuthError),
        ('FATAL:  no pg_hba.conf entry for host "10.0.0.1"', AuthError),
        ("FATAL:  must be superuser or replication role to start walsender", AuthError),
        ('FATAL:  database "shop" does not exist', SetupError),
        ('invalid connection option "hots"', SetupError),
    ],
)
def test_what_libpq_says_before_there_is_a_state(text: str, expected: type[RelayError]) -> None:
    found = translate(psycopg.OperationalError(text))
    assert type(found) is expected
    assert isinstance(found, TransientError) or found.hint


def test_a_closed_connection_is_a_lost_one() -> None:
    assert type(translate(psycopg.InterfaceError("the connection is closed"))) is SourceUnavailable


def test_a_bug_of_ours_is_not_retried() -> None:
    assert isinstance(translate(psycopg.ProgrammingError("the query has 0 placeholders")), OperatorError)
    assert isinstance(translate(psycopg.DataError("cannot dump")), OperatorError)


def test_texts_are_one_line() -> None:
    assert "\n" not in str(translate(of_state("57P01", "FATAL:  terminating\nserver closed the connection\n")))


def test_the_cause_is_kept_and_others_pass() -> None:
    with pytest.raises(SourceUnavailable) as caught, translated():
        raise of_state("57P01")
    assert isinstance(caught.value.__cause__, psycopg.Error)
    with pytest.raises(ZeroDivisionError), translated():
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("dsn", "environment", "own"),
    [
        ("postgresql://h/d?options=endpoint%3Dlake%20-c%20geqo%3Doff", "-c geqo=on", "endpoint=lake -c geqo=off"),
        ("postgresql://h/d", "-c geqo=off", "-c geqo=off"),
        ("postgresql://h/d", "", ""),
    ],
)
def test_options_of_the_dsn_are_kept_and_ours_come_last(
    monkeypatch: pytest.MonkeyPatch, dsn: str, environment: str, own: str
) -> None:
    """Some hosts find the server by one; the last of a name counts."""
    monkeypatch.setenv("PGOPTIONS", environment)
    found = options_of(Database.model_validate({"dsn": dsn}), LASTING)
    assert found == f"{own} {PINNED} {LASTING}".strip()
