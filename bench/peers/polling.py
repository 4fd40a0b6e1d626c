"""The polling worker under measurement: it marks the rows, so it gets rows of its own, and it has no slot."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from pathlib import Path

from bench.peers.poller import BATCH
from relay.bench.arena import Round
from relay.bench.process import Child
from relay.bench.tools import StoringTool
from relay.config import mask_dsn, mask_url

_SCRIPT = Path(__file__).parent / "poller.py"


class PollerTool(StoringTool):
    """poller.py, which sleeps `interval` seconds when it found less than a batch."""

    def __init__(self, name: str, interval: float, place: Round, _folder: Path) -> None:
        super().__init__(place)
        self.name = name
        self.mode = f"every {interval:g} s" if interval >= 1 else f"every {1000 * interval:g} ms"
        self._interval = interval
        client = "nats-py" if place.broker.kind == "jetstream" else "confluent-kafka"
        self.facts = {
            "version": f"Python {platform.python_version()}, {client} {version(client)}, psycopg {version('psycopg')}",
            "configuration": {"batch": BATCH, "interval": interval},
            "command": " ".join(
                [
                    "python",
                    *self._arguments("bench/peers/poller.py", mask_dsn(place.dsn), mask_url(place.broker.address)),
                ]
            ),
        }

    async def prepare(self) -> None:
        await self.place.broker.ensure(self.place.name)

    def process(self) -> Child:
        return Child(
            self.name, [sys.executable, *self._arguments(str(_SCRIPT), self.place.dsn, self.place.broker.address)]
        )

    def _arguments(self, script: str, dsn: str, address: str) -> list[str]:
        return [script, self.place.broker.kind, dsn, address, self.place.topic, f"{self._interval:g}"]
