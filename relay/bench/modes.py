"""Ways of reading and of writing that can be measured, by name. Pure.

A mode is written `stream-PLUGIN`, `poll-snapshot[@INTERVAL]` or `poll-claim[-WORKERS][@INTERVAL]`, and `+writeback` may
follow where the relay does not mark rows anyway: `poll-claim-4@100ms`, `stream-pgoutput+writeback`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from relay.errors import ConfigError
from relay.source.pgoutput import PgoutputDecoder
from relay.source.wal2json import Wal2jsonDecoder

Kind = Literal["jetstream", "kafka"]
EXAMPLES = "stream-pgoutput, stream-wal2json, poll-snapshot@1s, poll-claim-4@100ms, stream-pgoutput+writeback"

_MODE = re.compile(
    r"(?P<source>stream-(?P<plugin>pgoutput|wal2json)|poll-snapshot|poll-claim(-(?P<workers>[1-9]\d?))?)"
    r"(@(?P<every>\d+(\.\d+)?)(?P<unit>ms|s))?(?P<writeback>\+writeback)?"
)
_PLUGIN_OPTIONS = {  # the relay's own, so that the limit is asked to do the same work
    "pgoutput": PgoutputDecoder.options("outbox_relay"),
    "wal2json": Wal2jsonDecoder.options(["public.outbox_events"]),
}


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of reading: what it adds to the relay's configuration, and the limit it is held against."""

    name: str
    config: Mapping[str, Any]  # sections of relay.toml
    plugin: str  # of the slot that `pg_recvlogical` reads
    streams: bool = True
    marks: bool = False  # it updates the rows

    @property
    def plugin_options(self) -> Mapping[str, str]:
        return _PLUGIN_OPTIONS[self.plugin]

    @property
    def limit(self) -> str:
        """The mode of the limit's measurements."""
        return f"stream-{self.plugin}"


def parse_mode(text: str) -> Mode:
    """Raises ConfigError when there is no such mode."""
    found = _MODE.fullmatch(text)
    fault = None if found else f"--mode {text}: unknown; write for example {EXAMPLES}"
    if found and found["every"] and found["plugin"]:
        fault = f"--mode {text}: a stream has no interval"
    if found and found["every"] and not float(found["every"]):
        fault = f"--mode {text}: the interval must be more than 0"
    if found and found["writeback"] and found["source"].startswith("poll-claim"):
        fault = f"--mode {text}: claiming marks the rows anyway"
    if found is None or fault:
        raise ConfigError([fault or ""])
    plugin = found["plugin"] or "pgoutput"
    config: dict[str, Any] = {"source": {"mode": "stream" if found["plugin"] else "poll", "plugin": plugin}}
    seconds = float(found["every"] or 0) / (1000 if found["unit"] == "ms" else 1)
    claims = found["source"].startswith("poll-claim")
    if claims:
        config["poll"] = {"strategy": "claim", "workers": int(found["workers"] or 1)}
        if seconds:
            config["poll"] |= {"min_interval": seconds, "max_interval": seconds}
    elif not found["plugin"] and seconds:
        config["poll"] = {"interval": seconds}
    if found["writeback"]:
        config["outbox"] = [{"write_back": {"published_at": "now()"}}]
    return Mode(text, config, plugin, streams=bool(found["plugin"]), marks=claims or bool(found["writeback"]))


@dataclass(frozen=True, slots=True)
class Sink:
    """One way of writing: a broker, and what it adds to the relay's section of that broker."""

    name: str
    kind: Kind
    config: Mapping[str, Any]
    transactions: bool = False  # not every offset is an event


SINKS = {
    each.name: each
    for each in (
        Sink("jetstream", "jetstream", {}),  # as users have it: fenced, because the relay creates the stream
        Sink("jetstream-atomic", "jetstream", {"atomic": True}),
        Sink("jetstream-shared", "jetstream", {"mode": "shared"}),
        Sink("jetstream-relaxed", "jetstream", {"mode": "shared", "ordering": "relaxed"}),
        Sink("kafka", "kafka", {}),  # idempotent
        Sink("kafka-exactly-once", "kafka", {"mode": "exactly-once"}, transactions=True),
    )
}
