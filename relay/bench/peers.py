"""The door for other tools: what stands in `bench/peers` of the repository can be measured beside the relay.

`relay bench --peer NAME` looks up NAME in `PEERS` of the package `bench.peers`, which lies beside the package `relay`
in a checkout and is no part of what is installed. `PEERS` maps a name to a maker:

    def maker(place: Round, folder: Path) -> Tool

A maker is called once per round. It returns a `Tool` (tools.py); `StoringTool` there has the usual answers. What a
tool may rely on, and what it has to do:

- `place.dsn` is a database of this round's own. The table `outbox_events` and the publication `outbox_relay`
  (`publish = insert`) exist, the table is empty. `prepare()` makes what must exist before the rows: a slot with the
  name `slot` ("" if the tool has none), offsets, the stream (`await place.broker.ensure(place.name)`; a Kafka topic
  is there already).
- Every row has the same type, so every event belongs to `place.topic` (subject or topic); its key is
  `aggregate_id`. `place.broker.kind` is "jetstream" or "kafka", `place.broker.address` where it listens.
- The event's body must contain the payload as the row has it (escaped or not): the subscriber finds the time of
  writing and the row's number in it.
- `process()` returns a new `Child` that reads what is there and keeps running; SIGTERM must end it with exit code 0
  (pass `Child(..., codes=(0, 143))` for a program that ends otherwise). It may be called several times.
- The database belongs to this tool alone: it may mark or delete rows.
- `facts` (version, configuration, command) goes into the result as it is. It must not hold secrets.
- A maker that cannot measure with this broker, or whose program is not installed, raises `BenchError` with a hint. The
  figures are then left open in the result, with that reason; so they are when the tool fails while it is measured.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import relay

if TYPE_CHECKING:
    from relay.bench.arena import Round
    from relay.bench.tools import Tool

    Maker = Callable[[Round, Path], Tool]

_ROOT = Path(relay.__file__).parents[1]


def known() -> Mapping[str, Maker]:
    """What can be named after `--peer`; nothing outside a checkout."""
    if not (_ROOT / "bench" / "peers" / "__init__.py").exists():
        return {}
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    found: Mapping[str, Maker] = importlib.import_module("bench.peers").PEERS
    return found
