"""Ordinary (non-replication) sessions, and the one place where psycopg's errors become ours.

Every ordinary session goes to the primary, in UTC and autocommit; nothing here retries.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psycopg
from psycopg import AsyncConnection, errors, pq
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow

from relay.config import Database
from relay.errors import AuthError, ContractError, RelayError, SetupError, SlotBusy, SlotLost, SourceUnavailable

# Settings of role or database must not change what we publish (text formats), nor keep us from it: a query that takes
# long would be cancelled again and again, and a checkpoint that cannot be saved makes the server keep its WAL.
PINNED = (
    "-c client_encoding=utf8 -c datestyle=ISO -c intervalstyle=iso_8601 -c timezone=UTC "
    "-c bytea_output=hex -c extra_float_digits=3 "
    "-c statement_timeout=0 -c default_transaction_read_only=off"
)
LASTING = "-c idle_session_timeout=0"
"""For a session of the running relay: it may have nothing to do for long. (Unknown before 14, which `check` tells.)"""

Session = AsyncConnection[TupleRow]

_AUTH = {"28000", "28P01", "42501"}
_GONE = {"57P01", "57P02", "57P03", "57P05", "25P03"}  # shutdown, crash, starting up, session timeouts
_REFUSED = re.compile(r"password|authentication|pg_hba|certificate|private key|ssl.* alert |role .* does not exist")
_UNUSABLE = re.compile(r"invalid \S+ value|invalid port number|could not match \d+ (port|host)")  # libpq on a DSN


async def connect(database: Database, application_name: str, *, options: str = "") -> Session:
    """An autocommit session; raises SourceUnavailable, AuthError or SetupError."""
    with translated(), hanging_up():
        return await AsyncConnection.connect(
            database.conninfo(),
            autocommit=True,
            connect_timeout=max(1, round(database.connect_timeout)),
            application_name=application_name,
            options=options_of(database, options),
            # A dead network is noticed in half a minute, not in two hours.
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
            tcp_user_timeout=30_000,
        )


async def burn_xid(session: Session) -> int:
    """A transaction id that is newer than those of all transactions so far."""
    return await _number(session, b"SELECT pg_current_xact_id()::text")


async def oldest_xid(session: Session) -> int:
    """The oldest transaction that is still running: a snapshot taken from now on sees all before it that committed."""
    return await _number(session, b"SELECT pg_snapshot_xmin(pg_current_snapshot())::text")


async def _number(session: Session, query: bytes) -> int:
    with translated():
        row = await (await session.execute(query)).fetchone()
    assert row is not None
    return int(row[0])


async def refuse_standby(session: Session) -> None:
    """What a standby shows is not how the relay stands: locks and sessions of the primary are not seen there."""
    with translated():
        row = await (await session.execute("SELECT pg_is_in_recovery()")).fetchone()
    if row and row[0]:
        raise SetupError("this server is a standby", hint="point database.dsn at the primary")


def options_of(database: Database, more: str = "") -> str:
    """The session's options: those of the DSN (some hosts choose the server by one) or of PGOPTIONS, then our own."""
    defaults = {each.keyword: each.val for each in pq.Conninfo.get_defaults()}
    own = conninfo_to_dict(database.conninfo()).get("options") or (defaults.get(b"options") or b"").decode()
    return f"{own} {PINNED} {more}".strip()


@contextmanager
def hanging_up() -> Iterator[None]:
    """Close the socket of a connection that did not come about, also when we are cancelled.

    psycopg leaves it to the garbage collector, which may come minutes later; and a Postgres that stops waits for
    everybody who has connected and not yet said who he is (G11). What holds the socket are the frames of the attempt.
    """
    try:
        yield
    except BaseException as exc:
        found: BaseException | None = exc
        while found is not None:
            for frame, _ in traceback.walk_tb(found.__traceback__):
                if frame.f_globals.get("__name__", "").startswith("psycopg"):
                    with suppress(RuntimeError):  # it still runs
                        frame.clear()
            found = found.__context__
        raise


@contextmanager
def translated() -> Iterator[None]:
    """Raise our own errors for psycopg's."""
    try:
        yield
    except psycopg.Error as exc:
        raise translate(exc) from exc


def translate(exc: psycopg.Error) -> RelayError:
    """Our error for psycopg's. A state that nobody listed is never retried as if it were harmless."""
    state = exc.sqlstate or ""
    text = " ".join(str(exc).split())
    if state == "42501" and "output plugin" in text:
        return SetupError(
            text,
            hint="ALTER SYSTEM SET output_plugin_libraries = 'pgoutput','test_decoding','wal2json'; "
            "SELECT pg_reload_conf();  (separate quotes: one quoted list is taken as a single name)",
        )
    if state == "58P01" and "could not access file" in text:
        return SetupError(
            f"the output plugin is not installed on the server: {text}",
            hint="install it on the server of Postgres (Debian: apt-get install postgresql-<major>-wal2json; Red Hat: "
            'dnf install wal2json_<major>), or use the built-in one: source.plugin = "pgoutput"',
        )
    if state in _AUTH:
        return AuthError(
            text, hint="check user, password and pg_hba.conf; sql/roles.sql has the grants the relay needs"
        )
    if state == "55006":
        return SlotBusy(text, hint="another relay (or a frozen one, until wal_sender_timeout) holds the slot")
    if state == "42704" and "replication slot" in text:
        return SlotLost(
            text, hint="`relay run` with source.mode = auto closes the gap from the table and makes a new slot"
        )
    if state == "55000" and ("replication slot" in text or "invalidated" in text):
        return SlotLost(
            text, hint="`relay run` with source.mode = auto closes the gap from the table and makes a new slot"
        )
    if state == "42704" and "publication" in text:
        return publication_missing(text)
    if state == "42P01" and "outbox_relay_" in text:
        return SetupError(f"this database has no tables of the relay: {text}", hint="make them: `relay setup`")
    if state == "42703":
        return ContractError(text, hint="name the right columns under [outbox.columns]")
    if state == "55000" and "wal_level" in text:
        return SetupError(text, hint="ALTER SYSTEM SET wal_level = 'logical';  then restart Postgres")
    if state == "3D000":
        return SetupError(text, hint="check the database's name in database.dsn")
    if state == "53300" or state in _GONE or state.startswith("08"):
        return SourceUnavailable(text)
    if not state and isinstance(exc, errors.OperationalError | psycopg.InterfaceError):
        # libpq itself: refused, time-out, EOF. Authentication failures come here too before the server has a state.
        lowered = text.lower()
        if "server does not support ssl" in lowered:
            return AuthError(text, hint="database.dsn has an sslmode that asks for TLS: enable ssl in Postgres")
        if _REFUSED.search(lowered):
            return AuthError(text, hint="check user, password, TLS files and pg_hba.conf")
        if "does not exist" in lowered and "database" in lowered:
            return SetupError(text, hint="check the database's name in database.dsn")
        if "must be superuser or replication role" in lowered or "permission denied" in lowered:
            return AuthError(text, hint="ALTER ROLE … REPLICATION; sql/roles.sql has the grants the relay needs")
        if "connection option" in lowered or _UNUSABLE.search(lowered):
            return SetupError(text, hint="correct database.dsn")
        return SourceUnavailable(text, hint="does Postgres run, and is database.dsn right?")
    if state.startswith(("40", "57")) or state == "55P03":
        return SourceUnavailable(text)
    return SetupError(f"{text} (SQLSTATE {state})", hint="run `relay check`")


def publication_missing(text: str) -> SlotLost:
    """The stream reached a place where the publication did not exist; making it now does not change the past."""
    return SlotLost(
        f"Postgres says: {text}",
        hint="`relay setup` makes the publication; a slot from before it cannot be used any more: `relay run` with "
        "source.mode = auto replaces it and closes the gap from the table",
    )
