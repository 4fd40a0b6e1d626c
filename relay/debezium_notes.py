"""What `relay import-debezium` says about options: not needed, for which reason, or not translated. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from relay.debezium_options import Found

_SECRET = re.compile(r"password|secret|passphrase|jaas|token|\.seed|\.jwt")
# Prefixes of options that have no counterpart because the relay works differently, and how.
_NOT_NEEDED = {
    "heartbeat.": "an idle outbox never pins WAL, without a heartbeat table",
    "topic.heartbeat.": "there are no heartbeats",
    "topic.prefix": "topics come from the routing alone",
    "database.server.name": "topics come from the routing alone",
    "offset.": "the checkpoint is in the database",
    "schema.history.": "there is none",
    "snapshot.": "a first start publishes what the table holds; continued from the slot there is none",
    "tombstones.on.delete": "deletes are not published",
    "skipped.operations": "only inserts are published",
    "table.op.invalid.behavior": "updates are not published",
    "tasks.max": "one relay is active, others stand by",
    "publication.autocreate.mode": "`relay setup` looks after the publication",
    "slot.drop.on.stop": "the relay never drops a healthy slot",
    "slot.max.retries": "it retries for ever, with backoff",
    "slot.retry.delay.ms": "it retries for ever, with backoff",
    "lsn.flush.": "confirmed only when the broker has acknowledged",
    "flush.lsn.source": "confirmed only when the broker has acknowledged",
    "errors.": "it retries for ever, with backoff; what the broker can never take is said",
    "retriable.restart.": "it retries for ever, with backoff",
    "poll.interval.ms": "batches form by themselves",
    "max.batch.size": "batches form by themselves (delivery.max_batch_events)",
    "max.queue.": "the window is delivery.max_in_flight_events and _bytes",
    "status.update.interval.ms": "set by source.wal_sender_timeout",
    "provide.transaction.metadata": "relay-position names the transaction",
    "include.schema.changes": "there are none",
    "include.unknown.datatypes": "the payload is passed through",
    "hstore.handling.mode": "the payload is passed through",
    "interval.handling.mode": "columns keep Postgres' text",
    "decimal.handling.mode": "columns keep Postgres' text",
    "time.precision.mode": "columns keep Postgres' text",
    "binary.handling.mode": "a bytea payload is published as its bytes",
    "name": "named by relay.name",
    "connector.class": "PostgreSQL",
    "quarkus.": "the server's own: see [log] and [admin]",
    "producer.key.serializer": "bytes are sent as they are",
    "producer.value.serializer": "bytes are sent as they are",
    "producer.acks": "always all",
    "producer.enable.idempotence": "always on",
    "producer.retries": "it retries for ever",
    "producer.delivery.timeout.ms": "it retries for ever",
    "producer.max.in.flight.requests.per.connection": "order is kept in any case",
    "async.": "publishes overlap in a window, each acknowledged",
    "sync.": "publishes overlap in a window, each acknowledged",
}


@dataclass(slots=True)
class Notes:
    not_needed: list[str] = field(default_factory=list)
    not_translated: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def account(found: Found, notes: Notes) -> None:
    """Whatever is left: not needed, for a reason, or not translated."""
    left = [("", found.connector), ("router: ", found.router), (f"{found.sink}: ", found.options), ("", found.other)]
    for prefix, options in left:
        for key, value in options.items():
            short = re.sub(r"^(kafka|nats-jetstream)\.", "", key)
            if reason := reason_for(short):
                notes.not_needed.append(noted(prefix + key, value, reason))
            else:
                notes.not_translated.append(noted(prefix + key, value, ""))


def reason_for(option: str) -> str:
    for known, reason in _NOT_NEEDED.items():
        if option == known or (known.endswith(".") and option.startswith(known)):
            return reason
    return ""


def noted(option: str, value: str, why: str) -> str:
    shown = "***" if _SECRET.search(option) else " ".join(value.split())
    return f"{option} = {shown}" + (f"   ({why})" if why else "")


def told(notes: Notes) -> list[str]:
    parts = [
        ("", notes.remarks),
        ("Not translated, look at each:", notes.not_translated),
        ("Not needed:", notes.not_needed),
    ]
    lines = []
    for title, each in parts:
        if each:
            lines += [f"# {title}"] if title else []
            lines += [f"#   {line}" if title else f"# {line}" for line in each]
            lines.append("#")
    return lines
