"""`relay import-debezium`: a Debezium outbox configuration → the equivalent relay.toml. Pure.

Reads a Debezium Server `application.properties` or a Kafka Connect connector (JSON or properties) with the outbox event
router. Every option that it finds is accounted for: translated, named as not needed, or listed as not translated. It
never prints a secret.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import orjson

from relay.config import OWN_HEADERS
from relay.errors import ConfigError

ROUTER = "io.debezium.transforms.outbox.EventRouter"
_SECRET = re.compile(r"password|secret|passphrase|jaas|token|\.seed|\.jwt")
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
class Found:
    """The options of the files, sorted by whom they are for; what is used is taken out."""

    name: str = ""
    connector: dict[str, str] = field(default_factory=dict)
    router: dict[str, str] = field(default_factory=dict)
    sink: str = ""
    options: dict[str, str] = field(default_factory=dict)  # of the sink
    other: dict[str, str] = field(default_factory=dict)
    server: bool = False


@dataclass(slots=True)
class Notes:
    not_needed: list[str] = field(default_factory=list)
    not_translated: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


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
    _account(found, notes)
    return "\n".join([*lines, *_told(notes)]) + "\n"


def read(name: str, text: str) -> dict[str, str]:
    """The options of one file, JSON or properties."""
    if text.lstrip().startswith("{"):
        try:
            parsed = orjson.loads(text)
        except orjson.JSONDecodeError as exc:
            raise ConfigError([f"{name} is not JSON: {exc}"]) from None
        inner = parsed.get("config", parsed)
        if not isinstance(inner, dict):
            raise ConfigError([f"{name}: config is not an object"])
        if "name" in parsed:
            inner = {"name": parsed["name"], **inner}
        return {key: value if isinstance(value, str) else json.dumps(value) for key, value in inner.items()}
    return properties(text)


def properties(text: str) -> dict[str, str]:
    """Java's properties: # and ! comments, = or : or blank between, lines continued by a backslash."""
    found: dict[str, str] = {}
    for line in re.sub(r"\\\r?\n[ \t]*", "", text).splitlines():
        stripped = line.strip()
        if not stripped or stripped[0] in "#!":
            continue
        match = re.match(r"((?:\\.|[^\\=:\s])+)\s*[=:\s]?\s*(.*)", stripped)
        assert match is not None
        found[_unescape(match[1])] = _unescape(match[2])
    return found


def _unescape(text: str) -> str:
    known = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}

    def one(match: re.Match[str]) -> str:
        return chr(int(match[1][1:], 16)) if len(match[1]) == 5 else known.get(match[1], match[1])

    return re.sub(r"\\(u[0-9a-fA-F]{4}|.)", one, text)


def sort(options: Mapping[str, str]) -> Found:
    """Who each option is for; refuses what has no outbox event router."""
    found = Found(server=any(key.startswith("debezium.") for key in options))
    plain: dict[str, str] = {}
    for key, value in options.items():
        if key.startswith("debezium.source."):
            plain[key.removeprefix("debezium.source.")] = value
        elif key.startswith(("debezium.transforms", "debezium.predicates")):
            plain[key.removeprefix("debezium.")] = value
        elif key == "debezium.sink.type":
            found.sink = value
        elif key.startswith("debezium.sink."):
            found.options[key.removeprefix("debezium.sink.")] = value
        elif key.startswith("debezium.") or (found.server and key.startswith("quarkus.")):
            found.other[key] = value
        else:
            plain[key] = value
    aliases = [alias.strip() for alias in plain.pop("transforms", "").split(",") if alias.strip()]
    router = next((alias for alias in aliases if plain.get(f"transforms.{alias}.type") == ROUTER), None)
    if router is None:
        raise ConfigError(
            ["there is no outbox event router in it"],
            hint=f"the relay replaces Debezium's outbox router: a transform of the type {ROUTER}",
        )
    for key, value in plain.items():
        if key.startswith(f"transforms.{router}."):
            found.router[key.removeprefix(f"transforms.{router}.")] = value
        elif key.startswith(("transforms.", "predicates", "key.converter", "value.converter", "header.converter")):
            found.other[key] = value
        elif key.startswith("producer.override."):
            found.options[f"kafka.producer.{key.removeprefix('producer.override.')}"] = value
        else:
            found.connector[key] = value
    del found.router["type"]
    if not found.server:
        found.sink = "kafka"
    found.name = found.connector.get("name", "")
    return found


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
        notes.not_translated.append(_line(key, take(key), "libpq: add sslrootcert, sslcert, sslkey (PEM) to the dsn"))
    return [*lines, ""]


def _source(found: Found, notes: Notes) -> list[str]:
    take = found.connector.pop
    plugin, slot = take("plugin.name", "decoderbufs"), take("slot.name", "debezium")
    publication = take("publication.name", "dbz_publication")
    if plugin != "pgoutput":
        notes.not_translated.append(
            _line("plugin.name", plugin, "its slot cannot be continued: the relay makes one of its own")
        )
        notes.not_needed.append(_line("slot.name", slot, "drop it when Debezium is gone"))
        notes.not_needed.append(_line("publication.name", publication, f"{plugin} reads none"))
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
        notes.not_translated.append(_line("table.field.event.timestamp", timestamp, why))
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
            notes.not_translated.append(_line("table.fields.additional.placement", placement, why))
    if missing := router.pop("table.field.additional.missing", ""):
        why = "a column that is missing is an error"
        (notes.not_needed if missing == "error" else notes.not_translated).append(
            _line("table.field.additional.missing", missing, why)
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
        notes.not_translated.append(_line("route.topic.regex", regex, why))
        notes.not_translated.append(_line("route.topic.replacement", replacement, why))
        return ""
    return "" if topic == "outbox.event.{aggregate_type}" else topic


def _payload(found: Found, notes: Notes) -> None:
    """What the body will be against what it was; the converters decide that."""
    router, other = found.router, found.other
    if tombstone := router.pop("route.tombstone.on.empty.payload", ""):
        notes.not_needed.append(
            _line("route.tombstone.on.empty.payload", tombstone, "a NULL payload is a tombstone on Kafka, in any case")
        )
    expanded = router.pop("table.expand.json.payload", "false") == "true"
    if expanded:
        notes.not_needed.append(_line("table.expand.json.payload", "true", "the body is the JSON itself"))
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
                notes.not_needed.append(_line(f"{part}.converter", what, "the same bytes are sent"))
            continue
        if what in ("simplestring", "binary"):
            notes.not_needed.append(_line(f"debezium.format.{part}", what, "the same bytes are sent"))
            continue
        if part == "value" and expanded and schemas == "false" and what in ("json", "JsonConverter"):
            notes.not_needed.append(_line("value format", f"{what} without schemas", "the JSON itself is sent"))
            continue
        why = {
            "key": 'Debezium sent the key quoted, as JSON ("1"); the relay sends it bare (1): Kafka may choose another '
            "partition for a key from now on",
            "value": "Debezium wrapped the payload (as a JSON string, or with a schema); the relay sends the payload",
            "header": "Debezium sent header values as JSON; the relay sends the text",
        }[part]
        shown = what + (f", schemas.enable={schemas}" if schemas else "")
        notes.not_translated.append(_line(f"{part} format", shown, why))


def _tables(found: Found, notes: Notes) -> list[str]:
    listed = found.connector.pop("table.include.list", "") or found.connector.pop("table.whitelist", "")
    tables = []
    for pattern in (each.strip() for each in listed.split(",") if each.strip()):
        table = pattern.replace("\\.", ".").replace("[.]", ".")
        if re.fullmatch(r"[\w$]+\.[\w$]+", table):
            tables.append(table)
        else:
            notes.not_translated.append(
                _line("table.include.list", pattern, "a pattern: name its tables, a block each")
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
        _line("debezium.sink.type", found.sink, "the relay publishes to Kafka and to JetStream")
    )
    return []


def _kafka(found: Found, notes: Notes) -> list[str]:
    kept: dict[str, str] = {}
    for key in [key for key in found.options if key.startswith("kafka.producer.")]:
        name = key.removeprefix("kafka.producer.")
        target = _RENAMED_FOR_KAFKA.get(name, name)
        if name in _RENAMED_FOR_KAFKA or _KEPT_BY_KAFKA.fullmatch(name):
            kept[target] = found.options.pop(key)
        elif not _reason(f"producer.{name}"):
            why = "librdkafka may have it under another name: [sink.kafka.options]"
            if name == "sasl.jaas.config":
                why = '"sasl.username" and "sasl.password" = { file = "…" } in [sink.kafka.options]'
            elif "store" in name:
                why = "PEM files: ssl.ca.location, ssl.certificate.location, ssl.key.location in [sink.kafka.options]"
            said = key if found.server else f"producer.override.{name}"
            notes.not_translated.append(_line(said, found.options.pop(key), why))
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
        notes.not_translated.append(_line("nats-jetstream.storage", storage, why))
    return lines


def _account(found: Found, notes: Notes) -> None:
    """Whatever is left: not needed, for a reason, or not translated."""
    left = [("", found.connector), ("router: ", found.router), (f"{found.sink}: ", found.options), ("", found.other)]
    for prefix, options in left:
        for key, value in options.items():
            short = re.sub(r"^(kafka|nats-jetstream)\.", "", key)
            if reason := _reason(short):
                notes.not_needed.append(_line(prefix + key, value, reason))
            else:
                notes.not_translated.append(_line(prefix + key, value, ""))


def _reason(option: str) -> str:
    for known, reason in _NOT_NEEDED.items():
        if option == known or (known.endswith(".") and option.startswith(known)):
            return reason
    return ""


def _line(option: str, value: str, why: str) -> str:
    shown = "***" if _SECRET.search(option) else " ".join(value.split())
    return f"{option} = {shown}" + (f"   ({why})" if why else "")


def _told(notes: Notes) -> list[str]:
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


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
