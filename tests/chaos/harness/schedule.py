"""What a run is asked to do, and the faults that follow from its seed. Pure: the same options give the same faults.

The seed repeats the schedule and what every writer does; how the processes interleave is up to the machine.
"""

from __future__ import annotations

import random
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Broker = Literal["jetstream", "kafka"]
MODES: dict[str, tuple[str, ...]] = {"jetstream": ("shared", "fenced"), "kafka": ("idempotent", "exactly-once")}
EXACT = ("fenced", "exactly-once")


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault: what it breaks, how often it is drawn, and how long it lasts (0: a moment)."""

    target: Literal["relay", "broker", "postgres", "broker link", "postgres link", "slot", "writers"]
    weight: int
    shortest: float
    longest: float
    says: str


KINDS: dict[str, Kind] = {
    "relay-kill": Kind("relay", 8, 0, 0, "SIGKILL of the active relay; it is started again"),
    "relay-freeze": Kind("relay", 4, 0.5, 7, "SIGSTOP of the active relay; the stand-by takes over, then it wakes"),
    "relay-stop": Kind("relay", 4, 0, 0, "SIGTERM of the active relay: hand-over"),
    "relay-clock": Kind("relay", 2, 0.5, 4, "the relays' clock jumps by up to two hours, and back"),
    "broker-kill": Kind("broker", 3, 0, 1.5, "SIGKILL of the broker, started again"),
    "broker-stop": Kind("broker", 2, 0, 1, "clean stop of the broker, started again"),
    "broker-freeze": Kind("broker", 3, 0.5, 5, "SIGSTOP of the broker"),
    "broker-full": Kind("broker", 2, 0.5, 3, "the streams take no more messages (JetStream, discard new)"),
    "broker-refuse": Kind("broker link", 2, 0.5, 3, "connections to the broker are reset and refused"),
    "broker-cut": Kind("broker link", 4, 0, 0, "connections to the broker are reset"),
    "broker-stall": Kind("broker link", 4, 0.5, 5, "the network to the broker is silent, without a sign"),
    "broker-delay": Kind("broker link", 3, 1, 4, "the network to the broker is slow"),
    "postgres-restart": Kind("postgres", 2, 0, 0, "pg_ctl restart -m fast"),
    "postgres-immediate": Kind("postgres", 2, 0, 0, "pg_ctl restart -m immediate"),
    "postgres-kill": Kind("postgres", 2, 0, 1, "SIGKILL of all of Postgres, started again"),
    "postgres-cut": Kind("postgres link", 4, 0, 0, "connections to Postgres are reset"),
    "postgres-stall": Kind("postgres link", 4, 0.5, 5, "the network to Postgres is silent, without a sign"),
    "postgres-delay": Kind("postgres link", 3, 1, 4, "the network to Postgres is slow"),
    "walsender-end": Kind("slot", 4, 0, 0, "pg_terminate_backend of the walsender"),
    "slot-drop": Kind("slot", 6, 0, 0, "the walsender is ended and the slot dropped"),
    "slow-transaction": Kind("writers", 3, 0.5, 6, "a transaction with events stays open, then commits"),
    "prepared-transaction": Kind("writers", 2, 0.5, 4, "a transaction with events is prepared, committed later"),
}
# What the first of the two long runs is about: the slot is dropped every second, and the relay is hit meanwhile.
_SLOT_LOSS = (
    "relay-kill",
    "relay-freeze",
    "relay-stop",
    "postgres-restart",
    "postgres-kill",
    "slow-transaction",
    "prepared-transaction",
)
PROFILES: dict[str, tuple[str, ...]] = {
    "all": tuple(name for name in KINDS if name != "relay-clock"),
    "slot-loss": _SLOT_LOSS,
    "relay": ("relay-kill", "relay-freeze", "relay-stop"),
    "network": tuple(name for name, kind in KINDS.items() if kind.target in {"broker link", "postgres link"}),
}


@dataclass(frozen=True, slots=True)
class Options:
    """One run. `events` in total over `minutes`, and `faults` beside them."""

    seed: int = 1
    minutes: float = 2.0
    broker: Broker = "jetstream"
    mode: str = "shared"
    postgres: str = "18"
    plugin: str = "pgoutput"
    source: str = "auto"
    faults: int = 40
    events: int = 60_000
    profile: str = "all"
    relays: int = 2
    writers: int = 8
    keys: int = 64
    overlap: int = 2
    backlog: int = 50_000
    settle: float = 180.0
    report: Path = Path("chaos-results")

    @property
    def seconds(self) -> float:
        return self.minutes * 60

    @property
    def drops_every_second(self) -> bool:
        return self.profile == "slot-loss" and self.source != "poll"

    def faulty(self) -> str:
        """Why these options make no sense; empty when they do."""
        if self.mode not in MODES[self.broker]:
            return f"{self.broker} has the modes {', '.join(MODES[self.broker])}, not {self.mode}"
        if self.plugin == "wal2json" and self.postgres != "15":
            return "wal2json is installed for PostgreSQL 15 only: add --postgres 15"
        try:
            chosen = kinds(self)
        except ValueError as error:
            return str(error)
        return "" if chosen else f"no fault of the profile {self.profile} applies to these options"

    def command(self) -> str:
        """What to type to do the same again."""
        words = ["python", "-m", "tests.chaos.run"]
        for name in ("seed", "minutes", "broker", "mode", "postgres", "plugin", "source", "faults", "events"):
            words += [f"--{name}", f"{getattr(self, name):g}" if name == "minutes" else str(getattr(self, name))]
        plain = Options()
        for name in ("profile", "relays", "writers", "keys", "overlap", "backlog", "settle"):
            if getattr(self, name) != getattr(plain, name):
                words += [f"--{name}", str(getattr(self, name))]
        return shlex.join(words)


def kinds(options: Options) -> list[str]:
    """The kinds that this run draws from."""
    names = PROFILES.get(options.profile) or tuple(options.profile.split(","))
    unknown = [name for name in names if name not in KINDS]
    if unknown:
        raise ValueError(f"unknown profile or kind {', '.join(unknown)}: see docs/chaos.md")
    if options.broker != "jetstream":
        names = tuple(name for name in names if name != "broker-full")
    if options.source == "poll":
        names = tuple(name for name in names if KINDS[name].target != "slot")
    if options.source == "stream":  # it is meant to stop there
        names = tuple(name for name in names if name != "slot-drop")
    return list(names)


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of the schedule. `luck` decides what the kind leaves open, such as the size of a clock jump."""

    number: int
    at: float
    kind: str
    seconds: float
    luck: float


def schedule(options: Options) -> list[Fault]:
    """Spread over the run, at uneven distances; each kind comes once, if there is room, then lots are drawn."""
    chance = random.Random(options.seed)
    names = kinds(options)
    drawn = list(names)
    chance.shuffle(drawn)
    drawn = drawn[: options.faults]
    if options.faults > len(drawn):
        weights = [KINDS[name].weight for name in names]
        drawn += chance.choices(names, weights, k=options.faults - len(drawn))
    step = options.seconds / max(options.faults, 1)
    faults = []
    for number, name in enumerate(drawn):
        kind = KINDS[name]
        seconds = round(chance.uniform(kind.shortest, kind.longest), 2)
        at = round((number + chance.uniform(0.05, 0.95)) * step, 3)
        faults.append(Fault(number, at, name, seconds, chance.random()))
    return faults
