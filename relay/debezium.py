"""`relay import-debezium`: a Debezium outbox configuration → the equivalent relay.toml. Pure.

Reads a Debezium Server `application.properties` or a Kafka Connect connector (JSON or properties) with the outbox event
router (debezium_options.py). Every option that it finds is accounted for (debezium_notes.py): translated, named as not
needed, or listed as not translated. It never prints a secret.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from relay.config import OWN_HEADERS
from relay.debezium_notes import Notes, account, noted, reason_for, told
from relay.debezium_options import Found, read, sort

_COLUMNS = {
    # router option: (part of the relay's mapping, Debezium's default)
    "table.field.event.id": ("id", "id"),
    "table.field.event.key": ("aggregate_id", "aggregateid"),
    "table.field.event.payload": ("payload", "payload"),
    "route.by.field": ("aggregate_type", "aggregatetype"),
}
_KEPT_BY_KAFKA = re.compile(
    r"bootstrap\.servers|security\.protocol|sasl\.(mechanism|username|kerberos\.service\.name)|client\.id|linger\.ms"
    r"|compression\.type|batch\.size|request\.timeout\.ms|metadata\.max\.age\.ms|retry\.backoff\.ms"
    r"|ssl\.(ca|certificate|key)\.location|ssl\.endpoint\.identification\.algorithm"
)
_RENAMED_FOR_KAFKA = {"max.request.size": "message.max.bytes"}


def convert(files: Sequence[tuple[str, str]]) -> str:
    """The relay.toml for these files (name, text); later ones override earlier ones."""
    options: dict[str, str] = {}
    for name, text in files:
        options |= read(name, text)
    found = sort(options)
    notes = Notes()
    lines = ["# Made by `relay import-debezium`. Read the notes at the end before you use it.", ""]
    lines += ["[relay]", f"name = {_toml(_relay_name(found))}", ""]
    lines += _database(found, notes)
    lines += _source(found, notes)
    lines += _outbox(found, notes)
    lines += _sink(found, notes)
    account(found, notes)
    return "\n".join([*lines, *told(notes)]) + "\n"


def _relay_name(found: Found) -> str:
    name = re.sub(r"[^a-z0-9_]+", "_", found.name.lower()).strip("_")[:63]
    return name or "outbox_relay"


def _database(found: Found, notes: Notes) -> list[str]:
    take = found.connector.pop
    host, port = take("database.hostname", "127.0.0.1"), take("database.port", "5432")
    user, name = take("database.user", ""), take("database.dbname", "")
    address = f"[{host}]" if ":" in host else host
    dsn = f"postgresql://{quote(user, safe='')}@{address}:{port}/{quote(name, safe='')}"
    if "database.sslmode" in found.connector:
        dsn += f"?sslmode={take('database.sslmode')}"
    lines = ["[database]", f"dsn = {_toml(dsn)}"]
    if take("database.password", ""):
        lines.append("# password_file = …        # or PGPASSWORD, or a passfile: it is not copied from Debezium's file")
    for key in [key for key in found.connector if key.startswith("database.ssl")]:
        notes.not_translated.append(noted(key, take(key), "libpq: add sslrootcert, sslcert, sslkey (PEM) to the dsn"))
    return [*lines, ""]


def _source(found: Found, notes: Notes) -> list[str]:
    take = found.connector.pop
    plugin, slot = take("plugin.name", "decoderbufs"), take("slot.name", "debezium")
    publication = take("publication.name", "dbz_publication")
    if plugin != "pgoutput":
        notes.not_translated.append(
            noted("plugin.name", plugin, "its slot cannot be continued: the relay makes one of its own")
        )
        notes.not_needed.append(noted("slot.name", slot, "drop it when Debezium is gone"))
        notes.not_needed.append(noted("publication.name", publication, f"{plugin} reads none"))
        return []
    notes.remarks.append(
        f"Stop Debezium for good, then: relay setup --from-slot {slot} --publication {publication} && relay run"
    )
    return ["[source]", 'plugin = "pgoutput"', f"slot = {_toml(slot)}", f"publication = {_toml(publication)}", ""]


def _outbox(found: Found, notes: Notes) -> list[str]:
    router = found.router
    columns: dict[str, str] = {}
    for option, (part, default) in _COLUMNS.items():
        value = router.pop(option, default)
        if value != default:
            columns[part] = value
    named = {part: columns.get(part, default) for part, default in _COLUMNS.values()}
    if timestamp := router.pop("table.field.event.timestamp", ""):
        columns["created_at"] = timestamp
        why = "read as created_at; Kafka's record timestamp stays the time of publishing"
        notes.not_translated.append(noted("table.field.event.timestamp", timestamp, why))
    headers, own = _placements(router, named, notes)
    routing: dict[str, Any] = {}
    if topic := _topic(router, notes):
        routing["topic"] = topic
    if own:
        routing["headers"] = ["id", *own]
    _payload(found, notes)
    blocks = []
    for table in _tables(found, notes):
        lines = ["[[outbox]]", 'preset = "debezium"', f"table = {_toml(table)}"]
        if columns:
            lines += ["[outbox.columns]", *(f"{part} = {_toml(column)}" for part, column in columns.items())]
            lines.append('# event_type = ""          # if the table has no column "type"')
        if headers:
            lines += ["[outbox.header_columns]", *(f"{_toml(key)} = {_toml(value)}" for key, value in headers.items())]
        if routing:
            lines += ["[outbox.routing]", *(f"{key} = {_toml(value)}" for key, value in routing.items())]
        blocks += [*lines, ""]
    return blocks


def _placements(router: dict[str, str], named: Mapping[str, str], notes: Notes) -> tuple[dict[str, str], list[str]]:
    """`column:placement[:alias]` → header columns, and headers of the relay's own that say the same."""
    headers: dict[str, str] = {}
    own: list[str] = []
    parts = {"type": "type", named["aggregate_type"]: "aggregate-type", named["aggregate_id"]: "aggregate-id"}
    for placement in (each.strip() for each in router.pop("table.fields.additional.placement", "").split(",")):
        if not placement:
            continue
        column, where, *alias = placement.split(":")
        name = alias[0] if alias else column
        if where == "header" and parts.get(column) == name:
            own.append(name)
        elif where == "header" and name.lower() not in OWN_HEADERS and not name.lower().startswith(("nats-", "relay-")):
            headers[name] = column
        else:
            why = {
                "header": f"the header {name} is the relay's own",
                "envelope": "the body is the bare payload; publish the column as a header, or put it into the payload",
                "partition": "the key decides the partition: columns.partition_key replaces the key",
            }.get(where, "unknown placement")
            notes.not_translated.append(noted("table.fields.additional.placement", placement, why))
    if missing := router.pop("table.field.additional.missing", ""):
        why = "a column that is missing is an error"
        (notes.not_needed if missing == "error" else notes.not_translated).append(
            noted("table.field.additional.missing", missing, why)
        )
    return headers, own


def _topic(router: dict[str, str], notes: Notes) -> str:
    regex = router.pop("route.topic.regex", "(?<routedByValue>.*)")
    replacement = router.pop("route.topic.replacement", "outbox.event.${routedByValue}")
    whole = re.fullmatch(r"\((?:\?<(\w+)>)?\.[*+]\)", regex)
    names = [r"\$1", r"\$\{1\}", *([r"\$\{" + whole[1] + r"\}"] if whole and whole[1] else [])]
    topic = re.sub("|".join(names), "{aggregate_type}", replacement)
    if whole is None or "$" in topic or re.sub(r"\{aggregate_type\}", "", topic).count("{"):
        why = "write the topics by outbox.routing.topic, or let the row name its topic (outbox.columns.topic)"
        notes.not_translated.append(noted("route.topic.regex", regex, why))
        notes.not_translated.append(noted("route.topic.replacement", replacement, why))
        return ""
    return "" if topic == "outbox.event.{aggregate_type}" else topic


def _payload(found: Found, notes: Notes) -> None:
    """What the body will be against what it was; the converters decide that."""
    router, other = found.router, found.other
    if tombstone := router.pop("route.tombstone.on.empty.payload", ""):
        notes.not_needed.append(
            noted("route.tombstone.on.empty.payload", tombstone, "a NULL payload is a tombstone on Kafka, in any case")
        )
    expanded = router.pop("table.expand.json.payload", "false") == "true"
    if expanded:
        notes.not_needed.append(noted("table.expand.json.payload", "true", "the body is the JSON itself"))
    for part in ("key", "value", "header"):
        found_format = other.pop(f"debezium.format.{part}", "json" if found.server else "")
        converter = other.pop(f"{part}.converter", "")
        schemas = other.pop(f"{part}.converter.schemas.enable", "")
        schemas = other.pop(f"debezium.format.{part}.schemas.enable", "") or schemas
        what = converter.rpartition(".")[2] or found_format
        if not what or what in (
            "StringConverter",
            "ByteArrayConverter",
            "BinaryDataConverter",
            "SimpleHeaderConverter",
        ):
            if what:
                notes.not_needed.append(noted(f"{part}.converter", what, "the same bytes are sent"))
            continue
        if what in ("simplestring", "binary"):
            notes.not_needed.append(noted(f"debezium.format.{part}", what, "the same bytes are sent"))
            continue
        if part == "value" and expanded and schemas == "false" and what in ("json", "JsonConverter"):
            notes.not_needed.append(noted("value format", f"{what} without schemas", "the JSON itself is sent"))
            continue
        why = {
            "key": 'Debezium sent the key quoted, as JSON ("1"); the relay sends it bare (1): Kafka may choose another '
            "partition for a key from now on",
            "value": "Debezium wrapped the payload (as a JSON string, or with a schema); the relay sends the payload",
            "header": "Debezium sent header values as JSON; the relay sends the text",
        }[part]
        shown = what + (f", schemas.enable={schemas}" if schemas else "")
        notes.not_translated.append(noted(f"{part} format", shown, why))


def _tables(found: Found, notes: Notes) -> list[str]:
    listed = found.connector.pop("table.include.list", "") or found.connector.pop("table.whitelist", "")
    tables = []
    for pattern in (each.strip() for each in listed.split(",") if each.strip()):
        table = pattern.replace("\\.", ".").replace("[.]", ".")
        if re.fullmatch(r"[\w$]+\.[\w$]+", table):
            tables.append(table)
        else:
            notes.not_translated.append(
                noted("table.include.list", pattern, "a pattern: name its tables, a block each")
            )
    if not tables:
        notes.remarks.append("No table was named: public.outboxevent is an assumption. Correct [[outbox]] table.")
    return tables or ["public.outboxevent"]


def _sink(found: Found, notes: Notes) -> list[str]:
    if found.sink == "kafka":
        return _kafka(found, notes)
    if found.sink == "nats-jetstream":
        return _jetstream(found, notes)
    notes.not_translated.append(
        noted("debezium.sink.type", found.sink, "the relay publishes to Kafka and to JetStream")
    )
    return []


def _kafka(found: Found, notes: Notes) -> list[str]:
    kept: dict[str, str] = {}
    for key in [key for key in found.options if key.startswith("kafka.producer.")]:
        name = key.removeprefix("kafka.producer.")
        target = _RENAMED_FOR_KAFKA.get(name, name)
        if name in _RENAMED_FOR_KAFKA or _KEPT_BY_KAFKA.fullmatch(name):
            kept[target] = found.options.pop(key)
        elif not reason_for(f"producer.{name}"):
            why = "librdkafka may have it under another name: [sink.kafka.options]"
            if name == "sasl.jaas.config":
                why = '"sasl.username" and "sasl.password" = { file = "…" } in [sink.kafka.options]'
            elif "store" in name:
                why = "PEM files: ssl.ca.location, ssl.certificate.location, ssl.key.location in [sink.kafka.options]"
            said = key if found.server else f"producer.override.{name}"
            notes.not_translated.append(noted(said, found.options.pop(key), why))
    lines = ["[sink]", 'kind = "kafka"', "[sink.kafka.options]"]
    if "bootstrap.servers" not in kept:
        kept["bootstrap.servers"] = "127.0.0.1:9092"
        notes.remarks.append("bootstrap.servers is not in the file (a Connect worker has it): correct it.")
    return [*lines, *(f"{_toml(key)} = {_toml(value)}" for key, value in kept.items()), ""]


def _jetstream(found: Found, notes: Notes) -> list[str]:
    def take(name: str, default: str = "") -> str:
        return found.options.pop(f"nats-jetstream.{name}", default)

    servers = [url.strip() for url in take("url", "nats://127.0.0.1:4222").split(",")]
    lines = ["[sink]", 'kind = "jetstream"', "[sink.jetstream]", f"servers = {_toml(servers)}"]
    if user := take("auth.user"):
        lines.append(f"user = {_toml(user)}")
    if take("auth.password"):
        lines.append("# password_file = …        # the password is not copied from Debezium's file")
    subjects = take("subjects", "*.*.*").split(",")
    create = take("create-stream", "false") == "true"
    lines += ["[[sink.jetstream.streams]]", f"name = {_toml(take('stream-name', 'DebeziumStream'))}"]
    lines += [f"subjects = {_toml([each.strip() for each in subjects])}", f"create = {_toml(create)}", ""]
    if storage := take("storage"):
        why = "a stream that exists keeps its storage; streams that the relay creates are on disk"
        notes.not_translated.append(noted("nats-jetstream.storage", storage, why))
    return lines


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
