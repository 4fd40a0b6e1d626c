"""Configuration: `relay.toml`, overlaid by `RELAY_SECTION__KEY`, validated as a whole into one frozen `Config`.

All faults are reported at once, each with the path of its key; unknown keys are faults. Only `environment.py` reads the
environment. Secrets may come from the environment or from files, and are masked wherever a config is shown.
"""

from __future__ import annotations

from relay.config.environment import cache_folder, load, overlay, plain_environment
from relay.config.outbox import OWN_HEADERS, ROUTING_FIELDS, Claim, Columns, Outbox, Routing
from relay.config.postgres import Anchor, Checkpoint, Database, Poll, SourceSection
from relay.config.root import Admin, Config, Delivery, Log, Relay
from relay.config.secret import mask_dsn, mask_url, read_secret
from relay.config.section import Duration, Positive, Section, Size, Words
from relay.config.sink import JetStream, Kafka, KafkaOption, SecretFile, SinkSection, Stream, Tls

__all__ = [
    "OWN_HEADERS",
    "ROUTING_FIELDS",
    "Admin",
    "Anchor",
    "Checkpoint",
    "Claim",
    "Columns",
    "Config",
    "Database",
    "Delivery",
    "Duration",
    "JetStream",
    "Kafka",
    "KafkaOption",
    "Log",
    "Outbox",
    "Poll",
    "Positive",
    "Relay",
    "Routing",
    "SecretFile",
    "Section",
    "SinkSection",
    "Size",
    "SourceSection",
    "Stream",
    "Tls",
    "Words",
    "cache_folder",
    "load",
    "mask_dsn",
    "mask_url",
    "overlay",
    "plain_environment",
    "read_secret",
]
