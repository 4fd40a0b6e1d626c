"""Other tools in `relay bench --peer NAME`: same rows, same brokers, same measures. relay/bench/peers.py is the door.

    install.py, java.py   `make peers`: Debezium Server and, where there is none, Java, into the cache folder
    debezium.py           Debezium Server with its defaults, and with the leanest settings we found
    poller.py             a polling worker as most teams write it; stands alone, nothing of the relay in it
    polling.py            … and how it is measured

A tool gets the settings that do it justice, and they are in the result. Nothing is fetched while measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from bench.peers.debezium import DEFAULT, LEAN, DebeziumTool
from bench.peers.polling import PollerTool
from relay.bench.arena import Round
from relay.bench.tools import Tool

PEERS: Mapping[str, Callable[[Round, Path], Tool]] = {
    "debezium-lean": partial(DebeziumTool, LEAN),
    "debezium-default": partial(DebeziumTool, DEFAULT),
    "poller": partial(PollerTool, "poller", 0.1),
    "poller-1s": partial(PollerTool, "poller-1s", 1.0),
}
