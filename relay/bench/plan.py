"""What is measured, as data: scenarios and the options of one run. A new scenario of a known kind is an entry here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from relay.bench.modes import SINKS, Kind, Mode, Sink, parse_mode
from relay.errors import ConfigError

PAYLOAD_BYTES = 322  # as in the measurements of other tools that ours are compared with
KEYS = 1000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One kind of load. `quick` holds what `--quick` changes."""

    name: str
    title: str
    kind: Literal["drain", "kill", "steady", "burst", "idle", "writers"]
    rows: int = 0  # drain, kill: how many wait; burst: how many come at once
    per_transaction: int = 100  # rows that share a transaction; 0 is one transaction for all
    rate: int = 0  # steady: rows per second
    seconds: float = 0.0  # steady, burst, idle, writers: length of the measured window
    warmup: float = 0.0  # before the window
    every: float = 0.0  # burst: seconds from one burst to the next
    neighbours: float = 0.0  # share of the WAL that other tables write
    broker_delay: float = 0.0  # seconds that everything to and from the broker is held back
    limit: bool = True  # drain, steady: whether `pg_recvlogical` says anything about it
    quick: Mapping[str, Any] = field(default_factory=dict)


_DRAIN: Mapping[str, Any] = {"rows": 50_000}
SCENARIOS = {
    each.name: each
    for each in (
        Scenario("backlog", "rows that waited are drained", "drain", rows=300_000, quick=_DRAIN),
        Scenario(
            "steady",
            "rows at a fixed rate, each in a transaction of its own",
            "steady",
            per_transaction=1,
            rate=1000,
            seconds=30.0,
            warmup=5.0,
            quick={"seconds": 8.0, "warmup": 2.0},
        ),
        Scenario(
            "burst",
            "many rows at once, then silence, again and again",
            "burst",
            rows=10_000,
            seconds=30.0,
            every=5.0,
            quick={"rows": 5000, "seconds": 9.0, "every": 3.0},
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
        Scenario(
            "small-transactions",
            "rows that waited, each in a transaction of its own",
            "drain",
            rows=200_000,
            per_transaction=1,
            quick=_DRAIN,
        ),
        Scenario(
            "busy-neighbours",
            "rows that waited; other tables write 90 % of the WAL",
            "drain",
            rows=100_000,
            neighbours=0.9,
            quick={"rows": 20_000},
        ),
        Scenario(
            "slow-broker",
            "rows that waited; the broker is 20 ms away",
            "drain",
            rows=300_000,
            broker_delay=0.02,
            limit=False,
            quick=_DRAIN,
        ),
        Scenario(
            "writers",
            "writers at full speed, without the tool, with it, without it",
            "writers",
            per_transaction=1,
            seconds=10.0,
            quick={"seconds": 4.0},
        ),
        Scenario("kill", "SIGKILL at 40 %, then a new start", "kill", rows=100_000, quick={"rows": 30_000}),
    )
}
_DEFAULT = ("backlog", "steady", "idle", "big-transaction")
_QUICK = ("backlog", "steady", "idle")
_QUICK_MODES = ("stream-pgoutput", "poll-claim@100ms")
_FULL_MODES = (
    "stream-pgoutput",
    "poll-snapshot@1s",
    "poll-snapshot@100ms",
    "poll-claim@100ms",
    "poll-claim-4@100ms",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of `relay bench`."""

    scenarios: tuple[Scenario, ...]
    sinks: tuple[Sink, ...]
    modes: tuple[Mode, ...]
    repeat: int
    peers: tuple[str, ...] = ()
    baseline: str = ""  # a tool or a mode; "": no ratios but those to the limit
    keys: int = KEYS
    limit: bool = True
    postgres: str = "18"  # version to start
    dsn: str | None = None  # the user's own Postgres; None starts one
    broker: str | None = None  # the user's own broker; None starts one
    quick: bool = False
    calm: float | None = None  # share of the CPU that may be stolen; with more a round is measured again

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The brokers, in the order of their first use."""
        return tuple(dict.fromkeys(sink.kind for sink in self.sinks))

    @property
    def limits(self) -> tuple[Mode, ...]:
        """The streams that `pg_recvlogical` reads, too: one per plugin."""
        return tuple(parse_mode(name) for name in dict.fromkeys(mode.limit for mode in self.modes))


def make_plan(
    scenarios: Sequence[str] = (),
    *,
    sinks: Sequence[str] = (),
    modes: Sequence[str] = (),
    peers: Sequence[str] = (),
    known_peers: Sequence[str] = (),
    baseline: str = "",
    repeat: int | None = None,
    quick: bool = False,
    full: bool = False,
    limit: bool = True,
    keys: int | None = None,
    rows: int | None = None,
    rate: int | None = None,
    per_transaction: int | None = None,
    seconds: float | None = None,
    postgres: str | None = None,
    dsn: str | None = None,
    broker: str | None = None,
    calm: float | None = None,
) -> Plan:
    """The plan that the command line asks for. Raises ConfigError with every fault."""
    faults: list[str] = []
    scenarios = scenarios or (tuple(SCENARIOS) if full else _QUICK if quick else _DEFAULT)
    modes = modes or (_FULL_MODES if full else _QUICK_MODES if quick else ("stream-pgoutput",))
    sinks = sinks or (("jetstream", "kafka") if full else ("jetstream",))
    repeat = (3 if full else 1) if repeat is None else repeat
    chosen = _named("--scenario", scenarios, SCENARIOS.get, SCENARIOS, faults)
    outlets = _named("--sink", sinks, SINKS.get, SINKS, faults)
    read = []
    for text in dict.fromkeys(modes):
        try:
            read.append(parse_mode(text))
        except ConfigError as exc:
            faults += exc.faults
    _named("--peer", peers, {name: name for name in known_peers}.get, known_peers, faults)
    sizes = {"rows": rows, "rate": rate, "per_transaction": per_transaction, "seconds": seconds}
    given = {**sizes, "repeat": repeat, "keys": keys, "calm": calm}
    too_small = [name.replace("_", "-") for name, value in given.items() if value is not None and value <= 0]
    faults += [f"--{name} must be more than 0" for name in too_small]
    if quick and full:
        faults.append("--quick and --full exclude each other")
    wal2json = any(mode.plugin == "wal2json" for mode in read)
    plan = Plan(
        tuple(_sized(each, quick=quick, sizes=sizes) for each in chosen),
        tuple(outlets),
        tuple(read),
        repeat,
        peers=tuple(dict.fromkeys(peers)),
        baseline=baseline,
        keys=keys or KEYS,
        limit=limit,
        # Only Debian's 15 has wal2json; in one run everything is measured on the same server.
        postgres=postgres or ("15" if wal2json else "18"),
        dsn=dsn,
        broker=broker,
        quick=quick,
        calm=None if calm is None else calm / 100,
    )
    if broker is not None and len(plan.kinds) > 1:
        faults.append("--broker: a run with both JetStream and Kafka starts its own")
    if broker is not None and "kafka" in plan.kinds and any(each.broker_delay for each in chosen):
        faults.append("--broker: slow-broker needs a Kafka of its own, whose listener it can stand before")
    contenders = {*(mode.name for mode in read), *plan.peers, "relay", "pg_recvlogical"}
    if baseline and baseline not in contenders:
        faults.append(f"--baseline {baseline}: not in this run; there are {', '.join(sorted(contenders))}")
    if faults:
        raise ConfigError(faults)
    return plan


def _named(option: str, names: Sequence[str], get: Callable[[str], T | None], known: Any, faults: list[str]) -> list[T]:
    found = []
    for name in dict.fromkeys(names):
        value = get(name)
        if value is None:
            faults.append(f"{option} {name}: unknown; known are {', '.join(known) or 'none here'}")
        else:
            found.append(value)
    return found


def _sized(scenario: Scenario, *, quick: bool, sizes: Mapping[str, float | None]) -> Scenario:
    """A size that was asked for wins over `--quick`; one that a scenario does not have changes nothing in it."""
    if quick:
        scenario = replace(scenario, **scenario.quick)
    asked: dict[str, Any] = {name: size for name, size in sizes.items() if size is not None and getattr(scenario, name)}
    return replace(scenario, **asked)
