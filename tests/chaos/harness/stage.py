"""The parts on stage: Postgres, the broker, the network between them and the relays, and the relays themselves.

The relays reach both servers through proxies; writers, tail and verifier do not. A relay that ends is started again,
as systemd or Kubernetes would; every end that nobody asked for is kept for the report.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from relay.embedded import KafkaServer, NatsServer, PostgresServer
from relay.embedded.process import free_port
from tests.chaos.harness.schedule import Options
from tests.fix_proxy import Proxy
from tests.relays import write_config

STREAMS = ("chaos_a", "chaos_b")
TOPICS = tuple(f"{stream}.events" for stream in STREAMS)
SLOT = "chaos"
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_LIBFAKETIME = ("/usr/lib/*/faketime/libfaketime.so.1", "/usr/lib*/faketime/libfaketime.so.1")


def libfaketime() -> Path | None:
    """Debian's package `faketime`, if it is installed."""
    for pattern in _LIBFAKETIME:
        for path in Path("/").glob(pattern.lstrip("/")):
            return path
    return None


@dataclass
class Ended:
    """A relay that ended without being told to."""

    at: float
    relay: str
    code: int
    said: str


class RelayKeeper:
    """`relay run` in a process of its own, started again whenever it ends, until `stop()`."""

    def __init__(self, name: str, config: Path, folder: Path, clock: Path | None) -> None:
        self.name = name
        self._config, self._folder = config, folder
        self._port = free_port()
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._asked: set[int] = set()
        self._turn = asyncio.Lock()  # of whoever starts, or says that nobody shall any more
        self._over = False
        self.started = 0
        self.ends: list[Ended] = []
        self.last_code: int | None = None

    async def keep(self) -> None:
        """Runs until `stop()`; the task's owner cancels nothing."""
        while await self._start():
            assert self._process is not None
            try:
                pid, code = self._process.pid, await self._process.wait()
            except asyncio.CancelledError:  # Ctrl-C: nobody else would end it
                self.signal(signal.SIGKILL)
                raise
            self.last_code = code
            if pid not in self._asked:
                self.ends.append(Ended(time.monotonic(), self.name, code, self._last_words()))
                await asyncio.sleep(0.3)

    async def _start(self) -> bool:
        """False when it is over."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RELAY_", "PG"))}
        environment["RELAY_ADMIN__LISTEN"] = f"127.0.0.1:{self._port}"
        if self._clock is not None:
            environment |= {
                "LD_PRELOAD": str(libfaketime()),
                "FAKETIME_TIMESTAMP_FILE": str(self._clock),
                "FAKETIME_DONT_FAKE_MONOTONIC": "1",
                "FAKETIME_CACHE_DURATION": "1",
            }
        command = [sys.executable, "-m", "relay", "run", "--config", str(self._config)]
        async with self._turn:
            if self._over:
                return False
            with (
                (self._folder / f"{self.name}.log").open("ab") as out,
                (self._folder / f"{self.name}.err").open("ab") as err,
            ):
                self._process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=out, stderr=err)
            self.started += 1
        return True

    def _last_words(self) -> str:
        lines = (self._folder / f"{self.name}.err").read_text(errors="replace").splitlines()
        return "\n".join(lines[-12:])

    def tracebacks(self) -> int:
        """Errors that nobody foresaw; a restart may have cured them, and yet they are bugs."""
        said = (self._folder / f"{self.name}.err").read_text(errors="replace")
        return (
            said.count("\nTraceback (most") + said.startswith("Traceback (most") + said.count("+ Exception Group Tra")
        )

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def signal(self, what: signal.Signals) -> None:
        if self.running:
            assert self._process is not None
            if what in {signal.SIGKILL, signal.SIGTERM}:
                self._asked.add(self._process.pid)
            self._process.send_signal(what)

    async def state(self) -> str:
        """What its status page says; empty when it says nothing."""
        try:
            page = await asyncio.to_thread(self._page)
        except (OSError, ValueError):
            return ""
        return str(page.get("state", ""))

    def _page(self) -> dict[str, Any]:
        with _DIRECT.open(f"http://127.0.0.1:{self._port}/status", timeout=1.0) as answer:
            page: dict[str, Any] = orjson.loads(answer.read())
            return page

    async def stop(self, timeout: float = 30.0) -> int | None:
        """SIGTERM and the exit code; None when it had to be killed."""
        self.signal(signal.SIGCONT)
        deadline = time.monotonic() + timeout
        while not await self.state() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)  # one that was killed or started a moment ago has no handler for SIGTERM
        async with self._turn:
            self._over = True
        self.signal(signal.SIGTERM)
        if self._process is None:
            return 0
        try:
            return await asyncio.wait_for(self._process.wait(), timeout)
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self._process.wait()
            return None


@dataclass
class Stage:
    options: Options
    folder: Path
    postgres: PostgresServer
    broker: NatsServer | KafkaServer
    dsn: str
    postgres_link: Proxy
    broker_link: Proxy
    clock: Path | None
    relays: list[RelayKeeper] = field(default_factory=list)

    async def active(self) -> RelayKeeper:
        """The relay that works, or, while none does, the first that runs."""
        states = await asyncio.gather(*(relay.state() for relay in self.relays))
        for relay, state in zip(self.relays, states, strict=True):
            if state not in {"", "standby", "starting", "stopping"}:
                return relay
        return next((relay for relay in self.relays if relay.running), self.relays[0])

    def keep_logs(self) -> None:
        for server in (self.postgres, self.broker):
            if server.log_path.exists():
                shutil.copy(server.log_path, self.folder / f"{server.name}.log")


@contextlib.asynccontextmanager
async def stage(options: Options, folder: Path, *, clock: bool) -> AsyncIterator[Stage]:
    """Everything started and set up; no relay runs yet."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as servers:
        settings = {"max_prepared_transactions": 20, "max_connections": 200}
        postgres = PostgresServer(options.postgres, durable=False, settings=settings)
        broker, behind = _broker(options)
        for server in (postgres, broker):
            servers.callback(server.close)
            await asyncio.to_thread(server.start)
        dsn = await asyncio.to_thread(postgres.create_database, "chaos")
        postgres_link, broker_link = Proxy(dsn), behind
        for link in (postgres_link, broker_link):
            await link.resume()
        timestamps = folder / "clock" if clock else None
        if timestamps is not None:
            timestamps.write_text("+0\n")
        made = Stage(options, folder, postgres, broker, dsn, postgres_link, broker_link, timestamps)
        try:
            config = write_config(folder, _sections(options, postgres_link.url, broker_link))
            await _setup(config, folder)
            made.relays = [RelayKeeper(f"relay-{n + 1}", config, folder, timestamps) for n in range(options.relays)]
            yield made
        finally:
            made.keep_logs()
            for link in (postgres_link, broker_link):
                await link.refuse()


def _broker(options: Options) -> tuple[NatsServer | KafkaServer, Proxy]:
    if options.broker == "jetstream":
        nats = NatsServer()
        return nats, Proxy(nats.url)
    # A client of Kafka goes where the broker says: relays and verifiers need a listener each.
    direct, proxied, controller = free_port(), free_port(), free_port()
    link = Proxy(f"127.0.0.1:{proxied}")
    own = {
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listeners": f"PLAINTEXT://127.0.0.1:{direct},LINK://127.0.0.1:{proxied},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{direct},LINK://127.0.0.1:{link.port}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT,LINK:PLAINTEXT",
    }
    kafka = KafkaServer(own)
    kafka.port, kafka.bootstrap = direct, f"127.0.0.1:{direct}"
    return kafka, link


def _sections(options: Options, dsn: str, broker: Proxy) -> dict[str, Any]:
    """A relay.toml that reacts fast, so that a run of minutes sees as much as a day of life."""
    sink: dict[str, Any]
    if options.broker == "jetstream":
        streams = [{"name": name, "subjects": [f"{name}.>"], "create": True} for name in STREAMS]
        of_jetstream = {"servers": [broker.url], "ack_timeout": "2s", "connect_timeout": "2s", "streams": streams}
        sink = {"kind": "jetstream", "jetstream": {**of_jetstream, "mode": options.mode}}
    else:
        of_kafka = {"options": {"bootstrap.servers": broker.url}, "connect_timeout": "5s", "mode": options.mode}
        sink = {"kind": "kafka", "kafka": of_kafka}
    delivery = {"backoff_initial": "100ms", "backoff_max": "1s", "shutdown_timeout": "5s"}
    # A fence acknowledges every event for itself until a window's worth was stored since the last fault (ADR 0020).
    small = {"max_in_flight_events": 300, "max_batch_events": 100} if options.seed % 2 else {}
    return {
        "database": {"dsn": dsn, "connect_timeout": "3s"},
        "source": {
            "mode": options.source,
            "plugin": options.plugin,
            "slot": SLOT,
            "publication": SLOT,
            "wal_sender_timeout": "3s",
        },
        "routing": {"format": "payload"},
        "sink": sink,
        "delivery": {**delivery, **small},
        "checkpoint": {"interval": "300ms"},
        "log": {"format": "json"},
    }


async def _setup(config: Path, folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RELAY_", "PG"))}
    command = [sys.executable, "-m", "relay", "setup", "--config", str(config)]
    with (folder / "setup.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=log, stderr=log)
        code = await process.wait()
    if code:
        raise RuntimeError(f"relay setup ended with {code}:\n{(folder / 'setup.log').read_text()}")


def create_topics(bootstrap: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    made = admin.create_topics([NewTopic(topic, num_partitions=3, replication_factor=1) for topic in TOPICS])
    for future in made.values():
        future.result(30)
