"""Postgres with its doors locked: TLS only, passwords by SCRAM, client certificates; for every session of the relay.

The test's roles get in over TLS and in no other way, so a relay that streams has used it for its walsender too.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from relay.config import Config
from relay.embedded import NatsServer, PostgresServer
from relay.errors import AuthError
from relay.setup import setup
from relay.source.session import connect
from tests.certificates import Authority
from tests.fix_services import loudly
from tests.refusals import accepted, refused
from tests.relays import jetstream, settings, write_config

SECRET = "hunter2 'Geheim'"
HBA = [
    "hostssl all scram 127.0.0.1/32 scram-sha-256",
    "hostssl all bearer 127.0.0.1/32 cert",
    "host all scram,bearer 127.0.0.1/32 reject",
]


@pytest.fixture(scope="module")
def locked(authority: Authority) -> Iterator[PostgresServer]:
    """A server with TLS, and two roles: `scram` has a password, `bearer` needs a certificate."""
    files = {"ssl_cert_file": "../server.crt", "ssl_key_file": "../server.key", "ssl_ca_file": "../ca.pem"}
    with loudly():
        # The wheels of 16 and 18 are built without TLS.
        server = PostgresServer("15", durable=False, settings={"ssl": "on", **files}, hba=HBA)
        pair = authority.server("postgres")
        for source, name in ((pair.cert, "server.crt"), (pair.key, "server.key"), (authority.ca, "ca.pem")):
            shutil.copy(source, server.folder / name)
            if server._account.uid is not None:
                os.chown(server.folder / name, server._account.uid, -1)
        with server:
            quoted = SECRET.replace("'", "''")
            server.execute(f"CREATE ROLE scram LOGIN SUPERUSER PASSWORD '{quoted}'")
            server.execute("CREATE ROLE bearer LOGIN SUPERUSER")
            yield server


class Door:
    """A database behind it, and the ways to it."""

    def __init__(self, server: PostgresServer, name: str, authority: Authority) -> None:
        self.server, self.name, self.authority = server, name, authority

    def dsn(self, user: str, **more: Any) -> str:
        address = {"host": "127.0.0.1", "port": self.server.port, "dbname": self.name, "user": user}
        given = {**address, "sslmode": "verify-full", "sslrootcert": self.authority.ca, **more}
        return make_conninfo("", **{name: value for name, value in given.items() if value is not None})

    def config(self, folder: Path, nats: NatsServer, database: dict[str, Any]) -> Path:
        sections = {"source": {"slot": self.name}, "log": {"level": "debug"}}
        sink = jetstream(nats.url, "S")
        return write_config(folder, settings("", sink, **sections) | {"database": database})


@pytest.fixture
async def door(locked: PostgresServer, prefix: str, authority: Authority) -> Door:
    dsn = locked.create_database(prefix)
    await setup(Config.model_validate({"database": {"dsn": dsn}}))
    return Door(locked, prefix, authority)


def certificate(authority: Authority, name: str = "bearer") -> dict[str, Any]:
    pair = authority.client(name)
    return {"sslcert": pair.cert, "sslkey": pair.key}


# --- right ones


async def test_tls_and_a_password_from_its_file(door: Door, own_nats: NatsServer, tmp_path: Path) -> None:
    (tmp_path / "password").write_text(f"{SECRET}\n")
    database = {"dsn": door.dsn("scram"), "password_file": tmp_path / "password"}
    await accepted(door.config(tmp_path, own_nats, database), [SECRET])


async def test_a_passfile_and_a_dsn_from_its_file(door: Door, own_nats: NatsServer, tmp_path: Path) -> None:
    passfile = tmp_path / "pgpass"
    passfile.touch(mode=0o600)
    passfile.write_text(f"127.0.0.1:{door.server.port}:{door.name}:scram:{SECRET}\n")
    (tmp_path / "dsn").write_text(door.dsn("scram", passfile=passfile))
    await accepted(door.config(tmp_path, own_nats, {"dsn_file": tmp_path / "dsn"}), [SECRET])


async def test_a_password_in_the_dsn(door: Door, own_nats: NatsServer, tmp_path: Path) -> None:
    database = {"dsn": door.dsn("scram", password=SECRET)}
    await accepted(door.config(tmp_path, own_nats, database), [SECRET, "hunter2"])


async def test_a_client_certificate(door: Door, own_nats: NatsServer, tmp_path: Path) -> None:
    await accepted(door.config(tmp_path, own_nats, {"dsn": door.dsn("bearer", **certificate(door.authority))}))


async def test_an_encrypted_key(door: Door) -> None:
    pair = door.authority.client("bearer", password="hunter2")
    dsn = door.dsn("bearer", sslcert=pair.cert, sslkey=pair.key, sslpassword="hunter2")
    session = await connect(Config.model_validate({"database": {"dsn": dsn}}).database, "test")
    await session.close()


# --- wrong ones

WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "password": ("scram", {"password": "hunter2-falsch"}, "password authentication failed"),
    "no password": ("scram", {}, "no password supplied"),
    "without TLS": ("scram", {"password": SECRET, "sslmode": "disable", "sslrootcert": None}, "pg_hba.conf rejects"),
    "ca": ("scram", {"password": SECRET, "sslrootcert": "stranger"}, "certificate verify failed"),
    "no ca": ("scram", {"password": SECRET, "sslrootcert": "nowhere.pem"}, "does not exist"),
    "name": ("scram", {"password": SECRET, "host": "db.example", "hostaddr": "127.0.0.1"}, "does not match host name"),
    "no certificate": ("bearer", {}, "certificate"),
    "certificate": ("bearer", {"sslcert": "stranger", "sslkey": "stranger"}, "alert unknown ca"),
    "certificate of another": ("bearer", {"sslcert": "other", "sslkey": "other"}, "certificate authentication failed"),
    "unknown role": ("nobody_knows", {}, 'role "nobody_knows" does not exist'),
}


@pytest.mark.parametrize("kind", WRONG)
async def test_wrong_credentials_are_one_clear_line(
    kind: str, door: Door, own_nats: NatsServer, tmp_path: Path, stranger: Authority
) -> None:
    user, more, says = WRONG[kind]
    strange, other = stranger.client("bearer"), door.authority.client("other")
    paths = {
        ("sslrootcert", "stranger"): stranger.ca,
        ("sslcert", "stranger"): strange.cert,
        ("sslkey", "stranger"): strange.key,
        ("sslcert", "other"): other.cert,
        ("sslkey", "other"): other.key,
    }
    more = {name: paths.get((name, value), value) for name, value in more.items()}
    path = door.config(tmp_path, own_nats, {"dsn": door.dsn(user, **more)})
    await refused(path, says, [SECRET, "hunter2"])


async def test_a_server_without_tls_is_refused(own_postgres: PostgresServer) -> None:
    dsn = make_conninfo(own_postgres.dsn(), sslmode="require")
    with pytest.raises(AuthError, match="does not support SSL") as caught:
        await connect(Config.model_validate({"database": {"dsn": dsn}}).database, "test")
    assert "sslmode" in caught.value.hint


async def test_a_key_that_others_may_read(door: Door, tmp_path: Path) -> None:
    pair = door.authority.client("bearer")
    shutil.copy(pair.key, tmp_path / "open.key")
    (tmp_path / "open.key").chmod(0o644)
    dsn = door.dsn("bearer", sslcert=pair.cert, sslkey=tmp_path / "open.key")
    with pytest.raises(AuthError, match="private key file"):
        await connect(Config.model_validate({"database": {"dsn": dsn}}).database, "test")


def test_the_roles_get_in_over_tls_only(door: Door) -> None:
    with pytest.raises(psycopg.OperationalError, match="rejects"):
        psycopg.connect(door.dsn("scram", password=SECRET, sslmode="disable"))
