"""Debezium Server under measurement: the outbox event router on the plain table, to JetStream or Kafka.

Two sets of settings. DEFAULT is what one gets by naming only what must be named. LEAN is the fastest and smallest that
we found: larger batches, no waiting between polls, a fixed heap, no headers that nobody reads.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from bench.peers import install, java
from relay.bench.arena import Round
from relay.bench.process import BenchError, Child
from relay.bench.tools import StoringTool
from relay.config import mask_url

_MAIN = "io.debezium.server.Main"


@dataclass(frozen=True, slots=True)
class Settings:
    """What is added to what must be named."""

    name: str
    jvm: tuple[str, ...] = ()
    common: Mapping[str, str] = field(default_factory=dict)
    kafka: Mapping[str, str] = field(default_factory=dict)


DEFAULT = Settings("default")
LEAN = Settings(
    "lean",
    jvm=("-Xms1g", "-Xmx1g", "-XX:+UseParallelGC"),
    common={
        "debezium.source.max.batch.size": "8192",
        "debezium.source.max.queue.size": "32768",
        "debezium.source.poll.interval.ms": "5",
        "debezium.source.offset.flush.interval.ms": "1000",
        "debezium.source.extended.headers.enabled": "false",
        "debezium.format.header.schemas.enable": "false",
    },
    kafka={
        "debezium.sink.kafka.producer.linger.ms": "5",
        "debezium.sink.kafka.producer.batch.size": "262144",
        "debezium.sink.kafka.producer.compression.type": "lz4",
    },
)


class DebeziumTool(StoringTool):
    """One process per start; its offsets are in a file that outlives it, so that it can be killed and continue."""

    def __init__(self, settings: Settings, place: Round, folder: Path) -> None:
        super().__init__(place)
        lacking, found = install.missing(), java.find()
        if lacking or found is None:
            raise BenchError(f"{lacking} is not installed", hint="make peers")
        self.name = f"debezium-{settings.name}"  # as after --peer, so that it can be the --baseline
        self.mode = install.VERSION
        self.slot = f"{place.name}_debezium"
        self._file = folder / f"{self.slot}.properties"
        properties = _properties(settings, place, self.slot, folder / f"{self.slot}.offsets")
        self._file.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        # Without the first its threads log errors on Java 25; the second keeps unpacked libraries in this folder.
        access = ("--add-opens=java.base/java.lang=ALL-UNNAMED", f"-Djava.io.tmpdir={folder}")
        options = (*settings.jvm, *access, f"-Dsmallrye.config.locations={self._file}")
        self._command = [found.path, *options, "-cp", install.class_path(), _MAIN]
        self.facts = {
            "version": f"Debezium Server {install.VERSION}, Java {found.version}",
            "configuration": {name: mask_url(value) for name, value in properties.items()},
            "command": shlex.join(self._command),
        }

    async def prepare(self) -> None:
        await self.place.broker.ensure(self.place.name)
        await self.place.value("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", self.slot)

    def process(self) -> Child:
        password = str(conninfo_to_dict(self.place.dsn).get("password", ""))
        secret = {"DEBEZIUM_SOURCE_DATABASE_PASSWORD": password}
        return Child(self.name, self._command, codes=(0, 143), environment=secret)


def _properties(settings: Settings, place: Round, slot: str, offsets: Path) -> dict[str, str]:
    database = conninfo_to_dict(place.dsn)
    router = "debezium.transforms.outbox"
    return {
        "debezium.source.connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "debezium.source.database.hostname": str(database.get("host", "127.0.0.1")),
        "debezium.source.database.port": str(database.get("port", 5432)),
        "debezium.source.database.dbname": str(database["dbname"]),
        "debezium.source.database.user": str(database.get("user", "postgres")),
        "debezium.source.topic.prefix": place.name,
        "debezium.source.plugin.name": "pgoutput",
        "debezium.source.slot.name": slot,
        "debezium.source.publication.name": "outbox_relay",
        "debezium.source.publication.autocreate.mode": "disabled",
        "debezium.source.table.include.list": "public.outbox_events",
        "debezium.source.snapshot.mode": "no_data",
        "debezium.source.offset.storage": "org.apache.kafka.connect.storage.FileOffsetBackingStore",
        "debezium.source.offset.storage.file.filename": str(offsets),
        "debezium.format.key": "simplestring",
        "debezium.format.value": "simplestring",
        "debezium.transforms": "outbox",
        f"{router}.type": "io.debezium.transforms.outbox.EventRouter",
        f"{router}.table.field.event.id": "id",
        f"{router}.table.field.event.key": "aggregate_id",
        f"{router}.table.field.event.type": "event_type",
        f"{router}.table.field.event.payload": "payload",
        f"{router}.route.by.field": "aggregate_type",
        f"{router}.route.topic.regex": ".*",
        f"{router}.route.topic.replacement": place.topic,
        "quarkus.log.console.json": "false",  # as in the example that comes with it
        "quarkus.http.host": "127.0.0.1",
        "quarkus.http.port": "0",
        **_sink(place),
        **settings.common,
        **(settings.kafka if place.broker.kind == "kafka" else {}),
    }


def _sink(place: Round) -> dict[str, str]:
    if place.broker.kind == "jetstream":
        sink = "debezium.sink.nats-jetstream"
        return {
            "debezium.sink.type": "nats-jetstream",
            f"{sink}.url": place.broker.address,
            f"{sink}.stream-name": place.name,
        }
    producer = "debezium.sink.kafka.producer"
    serializer = "org.apache.kafka.common.serialization.StringSerializer"
    return {
        "debezium.sink.type": "kafka",
        f"{producer}.bootstrap.servers": place.broker.address,
        f"{producer}.acks": "all",
        f"{producer}.key.serializer": serializer,
        f"{producer}.value.serializer": serializer,
    }
