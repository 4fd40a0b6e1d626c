"""The whole relay as users run it: a process of its own on real servers.

`RelayProcess` is `relay run --config FILE` (started by `tests/zygote.py`), its log lines parsed. It does not look into
the relay's memory, and `eventually` is the only way to wait. `tests/ledger.py` checks what the relay did.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sized
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from relay.config import Config, load
from relay.embedded.process import freeze
from relay.setup import setup
from tests.zygote import Forked, zygote

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_PATIENCE = 90.0  # machines differ; whatever takes longer hangs


async def eventually(
    condition: Callable[[], Any],
    what: str = "",
    *,
    timeout: float = _PATIENCE,
    context: Callable[[], str] | None = None,
) -> Any:
    """Ask until the answer is true, and return it; fails with `what` and `context` when the time is over."""
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what}\n{context() if context else ''}")
        await asyncio.sleep(0.02)
    return answer


async def more_than(listed: Sized, count: int, what: str, *, context: Callable[[], str] | None = None) -> None:
    """Wait until the list has more than so many."""
    await eventually(lambda: len(listed) > count, f"more than {count}: {what}", context=context)


# --- configuration


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value)


def settings(dsn: str, sink: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """Sections of a relay.toml that reacts fast: for tests, not for life."""
    defaults: dict[str, dict[str, Any]] = {
        "database": {"dsn": dsn, "connect_timeout": "10s"},
        "sink": sink,
        "admin": {"listen": "127.0.0.1:0"},
        "checkpoint": {"interval": "200ms"},
        "delivery": {"backoff_initial": "100ms", "backoff_max": "500ms", "shutdown_timeout": "5s"},
    }
    for name, values in sections.items():
        defaults[name] = {**defaults.get(name, {}), **values} if isinstance(values, dict) else values
    return defaults


def jetstream(url: str, stream: str, **more: Any) -> dict[str, Any]:
    """A sink section: one stream, made by the relay, on the subjects `stream`.>"""
    streams = [{"name": stream, "subjects": [f"{stream}.>"], "create": True}]
    return {"kind": "jetstream", "jetstream": {"servers": [url], "ack_timeout": "5s", "streams": streams, **more}}


def kafka(bootstrap: str, **more: Any) -> dict[str, Any]:
    options = {"bootstrap.servers": bootstrap}
    return {"kind": "kafka", "kafka": {"options": options, "connect_timeout": "10s", **more}}


def create_topic(bootstrap: str, topic: str, partitions: int = 4) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    admin.create_topics([NewTopic(topic, num_partitions=partitions, replication_factor=1)])[topic].result(60)


def write_config(folder: Path, sections: dict[str, Any]) -> Path:
    path = folder / "relay.toml"
    path.write_text("".join(f"{name} = {toml(values)}\n" for name, values in sections.items()))
    return path


async def prepare(folder: Path, sections: dict[str, Any]) -> Path:
    """Write the configuration and set the database up."""
    path = write_config(folder, sections)
    await setup(load(path, {}))
    return path


def config_of(sections: dict[str, Any]) -> Config:
    return Config.model_validate(sections)


# --- the process


class RelayProcess:
    """`relay run` in a process of its own; ended, if need be killed, at the end of the `with` block."""

    def __init__(self, config: Path, *arguments: str) -> None:
        self._arguments = ["run", "--config", str(config), *arguments]
        self.lines: list[dict[str, Any]] = []
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._process: Forked | None = None
        self._readers: list[threading.Thread] = []

    def start(self) -> Self:
        self._process = zygote().start(*self._arguments)
        for stream, keep in ((self._process.stdout, self._log_line), (self._process.stderr, self.stderr.append)):
            reader = threading.Thread(target=_drain, args=(stream, keep), daemon=True)
            reader.start()
            self._readers.append(reader)
        return self

    def _log_line(self, line: str) -> None:
        self.stdout.append(line)
        with contextlib.suppress(json.JSONDecodeError):
            self.lines.append(json.loads(line))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.running:
            self.kill()
        for reader in self._readers:
            reader.join(30)
        if self._process is not None:
            for stream in (self._process.stdout, self._process.stderr):
                stream.close()

    # what it says

    @property
    def output(self) -> str:
        return "".join(["".join(self.stdout[-40:]), "".join(self.stderr[-40:])])

    def said(self, event: str, **values: Any) -> list[dict[str, Any]]:
        """Log lines of this event with these values (a string is searched in the value's text)."""

        def fits(line: dict[str, Any]) -> bool:
            return all(
                value in str(line.get(name, "")) if isinstance(value, str) else line.get(name) == value
                for name, value in values.items()
            )

        return [line for line in list(self.lines) if line.get("event") == event and fits(line)]

    async def says(self, event: str, *, timeout: float = _PATIENCE, **values: Any) -> dict[str, Any]:
        """Wait for such a line; fails at once when the process ends without it."""
        found = await eventually(
            lambda: self.said(event, **values) or not self.running,
            f"{event} {values}",
            timeout=timeout,
            context=lambda: self.output,
        )
        if found is True:
            found = self.said(event, **values)
        assert found, (
            f"the relay ended ({self._process and self._process.poll()}) without {event} {values}\n{self.output}"
        )
        last: dict[str, Any] = found[-1]
        return last

    def http(self, path: str) -> tuple[int, Any]:
        """An answer of the admin endpoint: code and JSON (or text); (0, None) while it does not listen."""
        started = self.said("relay.started")
        if not started:
            return 0, None
        try:
            with _DIRECT.open(f"http://127.0.0.1:{started[-1]['admin_port']}{path}", timeout=10) as answer:
                code, body = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            code, body = error.code, error.read()
        except OSError:
            return 0, None
        try:
            return code, json.loads(body)
        except json.JSONDecodeError:
            return code, body.decode()

    @property
    def status(self) -> dict[str, Any]:
        return self.http("/status")[1] or {}

    def counter(self, name: str) -> int:
        return int(self.status.get("counters", {}).get(name, 0))

    async def ready(self, timeout: float = _PATIENCE) -> None:
        await eventually(lambda: self.http("/readyz")[0] == 200, "ready", timeout=timeout, context=lambda: self.output)

    async def says_again(self, event: str, times: int) -> None:
        """Wait until it has said this more than so many times."""
        await eventually(lambda: len(self.said(event)) > times, f"{event} again", context=lambda: self.output)

    async def has_published(self, count: int, timeout: float = _PATIENCE) -> None:
        """Wait until it counts so many events as published; fails when it ends before."""
        await eventually(
            lambda: self.counter("published_events") >= count or not self.running,
            f"{count} events are published",
            timeout=timeout,
            context=lambda: self.output,
        )
        assert self.running, self.output

    async def streaming(self, timeout: float = _PATIENCE) -> None:
        await self.says("stream.started", timeout=timeout)

    @property
    def resident_bytes(self) -> int:
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    # what is done to it

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, what: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(what)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(60)

    def freeze(self) -> None:
        freeze([psutil.Process(self.pid)])

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    async def ended(self, timeout: float = _PATIENCE) -> int:
        """The exit code, when it has one; everything it said is read then."""
        await eventually(lambda: not self.running, "the relay ends", timeout=timeout, context=lambda: self.output)
        for reader in self._readers:
            await asyncio.to_thread(reader.join, 30)
        assert self._process is not None
        return int(self._process.wait())

    async def stopped(self, timeout: float = _PATIENCE) -> None:
        """SIGTERM, and a clean end. Whoever found its work done already may be here before it has begun to listen."""
        await self.says("relay.started", timeout=timeout)
        self.terminate()
        code = await self.ended(timeout)
        assert code == 0, self.output

    async def refuses(self, code: int, *texts: str, timeout: float = _PATIENCE) -> str:
        """It ends with this code, says all of these texts on stderr, gives a hint, and shows no traceback."""
        ended = await self.ended(timeout)
        told = "".join(self.stderr)
        assert ended == code, f"exit code {ended}\n{self.output}"
        for text in texts:
            assert text in told, f"{text!r} is not in:\n{told}"
        assert "error: " in told and "hint: " in told, told
        assert "Traceback" not in self.output, self.output
        return told


def _drain(stream: Iterable[str], keep: Callable[[str], None]) -> None:
    with contextlib.suppress(ValueError):  # closed under us
        for line in stream:
            keep(line)
