"""What is measured, as data: scenarios, modes and the options of one run. A new scenario or mode is an entry here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from relay.errors import ConfigError

SinkName = Literal["jetstream", "kafka"]
PAYLOAD_BYTES = 322  # as in the measurements of other tools that ours are compared with
KEYS = 1000


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of load. `quick` holds what `--quick` changes."""

    name: str
    title: str
    kind: Literal["drain", "steady", "idle"]
    rows: int = 0  # drain: how many wait
    per_transaction: int = 100  # drain: rows that share a transaction; 0 is one transaction for all
    rate: int = 0  # steady: rows per second, each in a transaction of its own
    seconds: float = 0.0  # steady, idle: length of the measured window
    warmup: float = 0.0  # steady, idle: before the window
    quick: Mapping[str, Any] = field(default_factory=dict)


SCENARIOS = {
    each.name: each
    for each in (
        Scenario("backlog", "rows that waited are drained", "drain", rows=300_000, quick={"rows": 50_000}),
        Scenario(
            "steady",
            "one row per transaction at a fixed rate",
            "steady",
            rate=1000,
            seconds=30.0,
            warmup=5.0,
            quick={"seconds": 10.0, "warmup": 2.0},
        ),
        Scenario("idle", "nothing happens", "idle", seconds=10.0, warmup=2.0, quick={"seconds": 5.0}),
        Scenario(
            "big-transaction",
            "one transaction holds all rows",
            "drain",
            rows=1_000_000,
            per_transaction=0,
            quick={"rows": 100_000},
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of reading: what it adds to the relay's configuration, and the limit it is held against."""

    name: str
    config: Mapping[str, Mapping[str, Any]]
    plugin: str  # of the slot that `pg_recvlogical` reads
    plugin_options: Mapping[str, str]


MODES = {
    each.name: each
    for each in (
        Mode("stream-pgoutput", {}, "pgoutput", {"proto_version": "1", "publication_names": '"outbox_relay"'}),
    )
}


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of `relay bench`."""

    scenarios: tuple[Scenario, ...]
    sink: SinkName
    mode: Mode
    repeat: int
    dsn: str | None = None  # the user's own Postgres; None starts one
    broker: str | None = None  # the user's own broker; None starts one
    quick: bool = False


def make_plan(
    scenarios: Sequence[str],
    *,
    sink: str,
    mode: str = "stream-pgoutput",
    repeat: int = 1,
    quick: bool = False,
    rows: int | None = None,
    rate: int | None = None,
    seconds: float | None = None,
    dsn: str | None = None,
    broker: str | None = None,
) -> Plan:
    """The plan that the command line asks for. Raises ConfigError with every fault."""
    faults = [
        f"--scenario {name}: unknown; known are {', '.join(SCENARIOS)}" for name in scenarios if name not in SCENARIOS
    ]
    if mode not in MODES:
        faults.append(f"--mode {mode}: unknown; known are {', '.join(MODES)}")
    if sink not in ("jetstream", "kafka"):
        faults.append(f"--sink {sink}: unknown; known are jetstream, kafka")
    given = {"rows": rows, "rate": rate, "seconds": seconds, "repeat": repeat}
    faults += [f"--{name} must be more than 0" for name, value in given.items() if value is not None and value <= 0]
    if faults:
        raise ConfigError(faults)
    chosen = tuple(
        _sized(SCENARIOS[name], quick=quick, rows=rows, rate=rate, seconds=seconds) for name in scenarios or SCENARIOS
    )
    return Plan(
        chosen, "kafka" if sink == "kafka" else "jetstream", MODES[mode], repeat, dsn=dsn, broker=broker, quick=quick
    )


def _sized(scenario: Scenario, *, quick: bool, rows: int | None, rate: int | None, seconds: float | None) -> Scenario:
    """A size that was asked for wins over `--quick`; one that a scenario does not have changes nothing in it."""
    if quick:
        scenario = replace(scenario, **scenario.quick)
    return replace(
        scenario,
        rows=rows if rows is not None and scenario.rows else scenario.rows,
        rate=rate if rate is not None and scenario.rate else scenario.rate,
        seconds=seconds if seconds is not None and scenario.seconds else scenario.seconds,
    )
