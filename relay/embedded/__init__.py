"""Real servers without Docker, for `relay demo`, `relay bench` and the tests: private, on free ports, gone afterwards.

Each server is a context manager; `start`, `stop`, `kill`, `restart`, `freeze` and `thaw` may be called in between, and
ports and data stay the same until `close()`. The calls block; nothing here is for production.
"""

from __future__ import annotations

from relay.embedded.kafka import KafkaServer
from relay.embedded.nats import NatsCluster, NatsServer
from relay.embedded.postgres import PostgresServer
from relay.embedded.process import EmbeddedError, Server

__all__ = ["EmbeddedError", "KafkaServer", "NatsCluster", "NatsServer", "PostgresServer", "Server"]
