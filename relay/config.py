"""Configuration: `relay.toml`, overlaid by `RELAY_SECTION__KEY`, validated as a whole into one frozen `Config`.

All faults are reported at once, each with the path of its key; unknown keys are faults. This is the only module that
reads the environment. Secrets may come from the environment or from files, and are masked wherever a config is shown.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import orjson
from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from relay.errors import ConfigError
from relay.presets import applied
from relay.schema import load_schemas

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_NAME = re.compile(r"[a-z0-9_]{1,63}")
_FIELD = re.compile(r"\{([^{}]*)\}")
_SECRET_OPTION = re.compile(r"password|secret|oauthbearer\.config|key\.pem|keystore\.pem|jaas|token$|passphrase")


def _seconds(value: Any) -> Any:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d)?\s*", value)
        if not match:
            raise ValueError("not a duration (write for example 500ms, 1s, 5m, 2h)")
        return float(match[1]) * _UNITS[match[2] or "s"]
    return value


def _size(value: Any) -> Any:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+)\s*((?:[kmg]i?)?b)?\s*", value, re.IGNORECASE)
        if not match:
            raise ValueError("not a size (write for example 512KB, 16MB, 1GiB)")
        return int(match[1]) * _SIZES[(match[2] or "").upper()]
    return value


def _listed(value: Any) -> Any:
    """Lists from the environment: JSON, or words with commas between."""
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            return _json(value)
        return [word.strip() for word in value.split(",") if word.strip()]
    return value


def _json(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError as exc:
            raise ValueError(f"not JSON: {exc}") from None
    return value


Duration = Annotated[float, BeforeValidator(_seconds), Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(_seconds), Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, BeforeValidator(_size), Field(gt=0)]
Words = Annotated[tuple[str, ...], BeforeValidator(_listed)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Relay(Section):
    name: str = Field(
        "outbox_relay",
        description="Names this relay: its lock, its checkpoint, its transactional id. One per database and purpose.",
    )

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("use 1 to 63 of a-z, 0-9 and _")
        return value


class Database(Section):
    dsn: SecretStr | None = Field(
        None, description="libpq connection string or URI of the primary. Without it libpq's own PG* variables apply."
    )
    dsn_file: Path | None = Field(None, description="File that holds the DSN, instead of `dsn`.")
    password_file: Path | None = Field(None, description="File that holds the password, instead of one in the DSN.")
    connect_timeout: Positive = Field(10.0, description="Longest wait for a connection.")

    @field_validator("dsn")
    @classmethod
    def _readable(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None:
            try:
                conninfo_to_dict(value.get_secret_value())
            except ProgrammingError as exc:
                raise ValueError(_unreadable(exc)) from None
        return value

    @model_validator(mode="after")
    def _one_dsn(self) -> Database:
        if self.dsn is not None and self.dsn_file is not None:
            raise ValueError("give dsn or dsn_file, not both")
        return self

    def conninfo(self) -> str:
        """The whole connection string, secrets included: for connecting, never for showing."""
        dsn = read_secret(self.dsn_file) if self.dsn_file else self.dsn.get_secret_value() if self.dsn else ""
        extra: dict[str, Any] = {}
        if self.password_file:
            extra["password"] = read_secret(self.password_file)
        try:
            return make_conninfo(dsn, **extra)
        except ProgrammingError as exc:
            raise ConfigError([f"database.dsn_file: {_unreadable(exc)}"]) from None


class Anchor(Section):
    """A second slot that is kept behind on purpose: what it holds can be replayed from the WAL, exactly."""

    slot: str = Field(
        "",
        description="Its name; made by `relay setup` or by the active relay, which also moves it on. Empty: there is "
        "none, and `relay replay --exact` is refused.",
    )
    retention: Positive = Field(3600.0, description="How far back it stays: older WAL is let go.")
    max_wal: Size = Field(
        2**30,
        description="Most WAL that may be kept, whatever `retention` says; and never more than half of the server's "
        "max_slot_wal_keep_size.",
    )

    @field_validator("slot")
    @classmethod
    def _slot(cls, value: str) -> str:
        if value and not _NAME.fullmatch(value):
            raise ValueError("a slot name has 1 to 63 of a-z, 0-9 and _")
        return value


class SourceSection(Section):
    mode: Literal["auto", "stream", "poll"] = Field(
        "auto",
        description="`auto` streams the WAL, and polls the table while that is not possible; `stream` stops when the "
        "slot is lost; `poll` never streams.",
    )
    plugin: Literal["pgoutput", "wal2json"] = Field(
        "pgoutput", description="Output plugin of the slot. wal2json must be installed and allowed on the server."
    )
    slot: str = Field("outbox_relay", description="Replication slot; created by the first `relay run`.")
    publication: str = Field(
        "outbox_relay", description="Publication that holds the outbox tables; created by `relay setup`."
    )
    failover: bool = Field(False, description="Make the slot a failover slot, synchronised to standbys (17 and later).")
    max_retained_wal: Annotated[int, BeforeValidator(_size), Field(ge=0)] = Field(
        0,
        description="When the slot holds more WAL than this, give it up, catch up from the table, and make a new one: "
        "saves the primary's disk. 0: the slot is kept until Postgres ends it.",
    )
    wal_sender_timeout: Positive = Field(
        15.0,
        description="After this silence Postgres frees the slot of a frozen relay, so that a stand-by can take over.",
    )
    retry: Positive = Field(
        10.0, description="While the table is polled because it cannot stream: time between two tries to."
    )
    distrust: Positive = Field(
        60.0, description="A stream that lacked rows of the table twice in a row is not tried again for so long."
    )
    anchor: Anchor = Field(
        default_factory=Anchor, description="A slot that stays behind, for exact replays (docs/replay.md)."
    )

    @field_validator("slot")
    @classmethod
    def _slot(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("a slot name has 1 to 63 of a-z, 0-9 and _")
        return value

    @model_validator(mode="after")
    def _two_slots(self) -> SourceSection:
        if self.anchor.slot == self.slot:
            raise ValueError("anchor.slot must be another slot than slot")
        return self


class Columns(Section):
    """Which column plays which part. A part that is set to "" does not exist in the table."""

    id: str = Field("id", description="Event id: the dedupe key on every path.")
    seq: str = Field("seq", description='Order in the table (identity). "" if there is none.')
    xid: str = Field("xid", description='Transaction id (xid8), for recovery from the table. "" if there is none.')
    aggregate_type: str = Field("aggregate_type", description='"" if there is none.')
    aggregate_id: str = Field("aggregate_id", description='"" if there is none.')
    event_type: str = Field("event_type", description='"" if there is none.')
    topic: str = Field("topic", description='Explicit destination of the row. "" if there is none.')
    partition_key: str = Field("partition_key", description='Key that overrides `routing.key`. "" if there is none.')
    payload: str = Field("payload", description="The body, or its `payload` member.")
    headers: str = Field("headers", description='JSON object of extra headers. "" if there is none.')
    created_at: str = Field("created_at", description='Time of the event. "" if there is none.')
    stream: str = Field("", description="JetStream stream that must store the row, if the table names it.")

    @model_validator(mode="after")
    def _needed(self) -> Columns:
        for part in ("id", "payload"):
            if not getattr(self, part):
                raise ValueError(f"{part} cannot be empty: every event has one")
        return self


ROUTING_FIELDS = (
    "topic",
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "partition_key",
    "id",
    "seq",
    "stream",
    "table",
)
OWN_HEADERS = ("id", "type", "aggregate-type", "aggregate-id", "seq", "content-type")


def _template(value: str) -> str:
    rest = _FIELD.sub("", value)
    if "{" in rest or "}" in rest:
        raise ValueError("unbalanced braces")
    for name in _FIELD.findall(value):
        if name not in ROUTING_FIELDS:
            raise ValueError(f"unknown field {{{name}}}; known are " + ", ".join(f"{{{f}}}" for f in ROUTING_FIELDS))
    return value


class Routing(Section):
    topic: str = Field(
        "{topic}",
        description="Topic or subject. The default takes the row's topic, and where that is NULL `fallback_topic`.",
    )
    fallback_topic: str = Field(
        "events.{aggregate_type}.{event_type}", description="Used where a field of `topic` is NULL in the row."
    )
    key: str = Field("{aggregate_id}", description="Order and partition key; the row's partition_key overrides it.")
    format: Literal["envelope", "payload", "cloudevents"] = Field(
        "envelope",
        description="Form of the body: an envelope around the payload, the bare payload with what describes it in "
        "headers, or a CloudEvent in binary mode.",
    )
    headers: Words = Field(
        OWN_HEADERS, description="Which of the relay's own headers to send; `relay-position` is always sent."
    )
    source: str = Field("/{table}", description="CloudEvents `source`.")
    schemas: Annotated[dict[str, Path], BeforeValidator(_json)] = Field(
        default_factory=dict,
        description='JSON Schema of the payload, by event type: `"order.created" = "schemas/order.json"`. A payload '
        "that does not fit is rejected. Needs the extra `schema`.",
    )

    _check = field_validator("topic", "fallback_topic", "key")(_template)

    @field_validator("headers")
    @classmethod
    def _known_headers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [name for name in value if name not in OWN_HEADERS]
        if unknown:
            raise ValueError(f"unknown header {', '.join(unknown)}; known are {', '.join(OWN_HEADERS)}")
        return value

    @field_validator("source")
    @classmethod
    def _table_only(cls, value: str) -> str:
        if set(_FIELD.findall(value)) - {"table"} or not value:
            raise ValueError("may contain {table}, nothing else in braces, and not be empty")
        return value


class Claim(Section):
    """Which columns claim polling keeps its retries in. A part that is set to "" does not exist in the table."""

    attempts: str = Field(
        "attempts",
        description="Counts the times that the broker rejected the event. Without it they are counted in memory.",
    )
    next_attempt: str = Field(
        "next_attempt_at", description="Before this time the row is left alone. Without it the time is kept in memory."
    )
    last_error: str = Field("last_error", description='Why it was rejected last. "" if there is no such column.')
    failed: dict[str, Literal[True, False] | str] = Field(
        default_factory=dict,
        description='Columns to set when `poll.max_attempts` is reached: `column = "value"`; `"now()"` is the time, '
        '`"{error}"` the reason. They must make the row one that is not `unpublished` any more. Empty: the row is '
        "passed over while `attempts` is not below the limit.",
    )


class Outbox(Section):
    preset: Literal["event_outbox", "outbox", "stream_outbox", "service_outbox", "debezium"] | None = Field(
        None, description="A table that many have: fills in what this block does not say (docs/presets.md)."
    )
    table: str = Field("public.outbox_events", description="Schema-qualified name, as Postgres spells it.")
    columns: Columns = Field(default_factory=Columns, description="Names of the table's columns.")
    header_columns: dict[str, str] = Field(
        default_factory=dict, description='Further columns to publish as headers: `header = "column"`.'
    )
    routing: Routing | None = Field(None, description="Routing of this table's events, instead of `[routing]`.")
    unpublished: dict[str, Literal[True, False] | str] = Field(
        default_factory=dict,
        description='How the table says that a row is unpublished: `column = "value"`; `"NULL"` means IS NULL.',
    )
    write_back: dict[str, Literal[True, False] | str] = Field(
        default_factory=dict,
        description="Columns to set once the broker has acknowledged, for readers that expect it: "
        '`column = "value"`; `"now()"` is the time. Empty: the row is never touched.',
    )
    claim: Claim = Field(
        default_factory=Claim, description='Only for `poll.strategy = "claim"`: where retries are noted.'
    )

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, block: Any) -> Any:
        return applied(block) if isinstance(block, dict) else block

    @field_validator("table")
    @classmethod
    def _qualified(cls, value: str) -> str:
        if not value or value.count(".") > 1 or value.startswith(".") or value.endswith("."):
            raise ValueError("write schema.table (a name that itself contains a dot is not supported)")
        return value if "." in value else f"public.{value}"

    @field_validator("header_columns")
    @classmethod
    def _sendable(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name.lower() in OWN_HEADERS or name.lower().startswith(("nats-", "relay-")):
                raise ValueError(f"the header {name} is the relay's own")
        return value


class Stream(Section):
    name: str = Field(description="Name of the JetStream stream.")
    subjects: Words = Field(
        description="Subjects of the stream; an event goes to the stream whose subject matches its topic."
    )
    create: bool = Field(False, description="Create the stream when it is missing.")
    replicas: int = Field(1, ge=1, le=5, description="Replicas of a stream that the relay creates.")
    max_age: Duration = Field(0.0, description="Age limit of a stream that the relay creates; 0 keeps for ever.")
    duplicate_window: Positive = Field(120.0, description="Dedupe window of a stream that the relay creates.")

    @field_validator("name")
    @classmethod
    def _stream_name(cls, value: str) -> str:
        if not value or any(c.isspace() or c in ".*>/\\" for c in value):
            raise ValueError("a stream name has no spaces and none of . * > / \\")
        return value


class Tls(Section):
    ca: Path | None = Field(None, description="CA bundle that signs the servers.")
    cert: Path | None = Field(None, description="Client certificate (mTLS).")
    key: Path | None = Field(None, description="Key of the client certificate.")
    hostname: str | None = Field(None, description="Name to expect in the server's certificate, if not the URL's.")


class JetStream(Section):
    servers: Words = Field(("nats://127.0.0.1:4222",), repr=False, description="URLs of the servers.")
    mode: Literal["auto", "shared", "fenced"] = Field(
        "auto",
        description="How duplicates are prevented (docs/guarantees.md). `fenced`: the streams are this relay's alone; "
        "exactly once. `shared`: other writers may use them; dedupe by message id. `auto`: fenced where the relay "
        "created all of its streams.",
    )
    foreign_writer: Literal["stop", "share"] = Field(
        "stop",
        description="When a fenced stream turns out to have another writer: `stop` with exit code 3, or `share` it, "
        "that is go on as in mode `shared` until the next start.",
    )
    ordering: Literal["strict", "relaxed"] = Field(
        "strict",
        description="In mode `shared`: `strict`: never two unacknowledged events of one key in flight; `relaxed` lifts "
        "that for speed.",
    )
    atomic: bool = Field(
        False,
        description="In mode `fenced`: publish batches atomically (from nats-server 2.12.1 on, streams with "
        "`allow_atomic`). For servers that sync every write (`sync_interval: always`): once for a batch then.",
    )
    streams: Annotated[tuple[Stream, ...], BeforeValidator(_json)] = Field(
        (), description="Streams that the relay expects (or creates). Without any, the server's own streams are used."
    )
    domain: str | None = Field(None, description="JetStream domain.")
    ack_timeout: Positive = Field(
        5.0, description="Longest wait for an acknowledgement before the connection is renewed."
    )
    connect_timeout: Positive = Field(5.0, description="Longest wait for a connection.")
    user: str | None = Field(None, description="User name.")
    password: SecretStr | None = Field(None, description="Password of the user.")
    password_file: Path | None = Field(None, description="File that holds the password.")
    token: SecretStr | None = Field(None, description="Token.")
    token_file: Path | None = Field(None, description="File that holds the token.")
    nkey_seed_file: Path | None = Field(None, description="File that holds the nkey seed.")
    credentials_file: Path | None = Field(None, description="`.creds` file with user JWT and seed.")
    tls: Tls | None = Field(None, description="TLS settings; `tls://` URLs use the system's CAs without them.")

    @field_validator("servers")
    @classmethod
    def _some(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("at least one URL is needed")
        for url in value:
            if not re.match(r"(nats|tls|ws|wss)://\S+$", url):
                raise ValueError(f"{mask_url(url)!r} is not a URL (write nats://host:4222 or tls://host:4222)")
            try:
                readable = urlsplit(url).port != 0 and "@" not in "".join(urlsplit(url)[2:])
            except ValueError:
                readable = False
            if not readable:  # and not shown: half a password may stand where the port should
                raise ValueError("a URL cannot be read (in a password write %40 for @, %2F for /, %2C for a comma)")
        return value

    @model_validator(mode="after")
    def _fenced_only(self) -> JetStream:
        if self.atomic and self.mode == "shared":
            raise ValueError('atomic: is for fenced streams; leave it out, or set mode = "fenced"')
        return self

    @model_validator(mode="after")
    def _distinct(self) -> JetStream:
        names = [stream.name for stream in self.streams]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"streams: {', '.join(twice)} is listed twice")
        return self

    @model_validator(mode="after")
    def _one_secret(self) -> JetStream:
        if self.user is None and (self.password or self.password_file):
            raise ValueError("a password needs a user")
        for name in ("password", "token"):
            if getattr(self, name) and getattr(self, f"{name}_file"):
                raise ValueError(f"give {name} or {name}_file, not both")
        return self


class SecretFile(Section):
    file: Path


KafkaOption = bool | int | float | str | SecretFile


def _local_kafka() -> dict[str, KafkaOption]:
    return {"bootstrap.servers": "127.0.0.1:9092"}


class Kafka(Section):
    mode: Literal["idempotent", "exactly-once"] = Field(
        "idempotent",
        description="`idempotent`: fast, and repeats events after a crash. `exactly-once`: transactions; readers with "
        "`isolation.level=read_committed` see each event once. See docs/guarantees.md, G4.",
    )
    transactional_id: str = Field(
        "", description="Exactly-once: the transactional id. Empty: made of the relay's name and the database server."
    )
    position_topic: str = Field(
        "outbox_relay_positions",
        min_length=1,
        description="Exactly-once: compacted topic that has a record of every transaction; created if missing.",
    )
    transaction_events: int = Field(
        10_000, ge=1, description="Exactly-once: most events of a transaction. Small when there is little to do."
    )
    create_topics: bool = Field(False, description="Create topics that are missing.")
    topics: Words = Field((), description="Topics to check (or create) at start; others are checked when first used.")
    partitions: int = Field(
        -1, ge=-1, description="Partitions of topics that the relay creates; -1 is the broker's default."
    )
    replication_factor: int = Field(
        -1, ge=-1, description="Replicas of topics that the relay creates; -1 is the broker's default."
    )
    connect_timeout: Positive = Field(10.0, description="Longest wait for the brokers' metadata.")
    options: Annotated[dict[str, KafkaOption], BeforeValidator(_json)] = Field(
        default_factory=_local_kafka,
        repr=False,  # like `servers`, it may hold a secret in plain text
        description='librdkafka\'s own names, passed through; `{ file = "…" }` reads a secret. '
        "In the environment write `_` for `.`.",
    )

    def librdkafka(self) -> dict[str, bool | int | float | str]:
        """The options with secrets read from their files: for connecting, never for showing."""
        return {k: read_secret(v.file) if isinstance(v, SecretFile) else v for k, v in self.options.items()}


class SinkSection(Section):
    kind: Literal["jetstream", "kafka", "console"] = Field("jetstream", description="The broker.")
    jetstream: JetStream = Field(default_factory=JetStream, description="NATS JetStream.")
    kafka: Kafka = Field(default_factory=Kafka, description="Kafka and what speaks its protocol.")

    @model_validator(mode="after")
    def _addressed(self) -> SinkSection:
        if self.kind == "kafka" and not {"bootstrap.servers", "metadata.broker.list"} & set(self.kafka.options):
            raise ValueError('kafka.options: "bootstrap.servers" is required')
        return self


class Delivery(Section):
    max_in_flight_events: int = Field(
        5000, ge=1, le=50_000, description="Events read but not yet acknowledged, at most."
    )
    max_in_flight_bytes: Size = Field(16 * 2**20, description="Bytes read but not yet acknowledged, at most.")
    max_batch_events: int = Field(500, ge=1, description="Events that travel together, at most.")
    backoff_initial: Positive = Field(1.0, description="First wait after a transient failure; doubles each time.")
    backoff_max: Positive = Field(60.0, description="Longest wait between two tries.")
    stalled_after: Positive = Field(
        30.0,
        description="Unready when the oldest unacknowledged event is older than this, or Postgres silent for longer.",
    )
    shutdown_timeout: Positive = Field(10.0, description="Longest drain after SIGTERM; what is left is redelivered.")

    @model_validator(mode="after")
    def _growing(self) -> Delivery:
        if self.backoff_initial > self.backoff_max:
            raise ValueError("backoff_initial must not exceed backoff_max")
        return self


class Checkpoint(Section):
    interval: Positive = Field(1.0, description="How often progress is saved, then confirmed to Postgres.")
    audit: bool = Field(
        True, description="Compare what the stream brought with what the table holds, and publish what is missing."
    )
    history_interval: Positive = Field(
        60.0, description="How often (LSN, snapshot) is kept for replays, while events move."
    )
    history_retention: Positive = Field(7 * 86400.0, description="How long the history is kept.")


class Poll(Section):
    strategy: Literal["snapshot", "claim"] = Field(
        "snapshot",
        description='How `source.mode = "poll"` finds events. `snapshot`: by transactions, without an UPDATE. `claim`: '
        "locks rows, publishes them, and marks them: for tables without xid, and beside a worker of the application. "
        "See docs/polling.md.",
    )
    interval: Positive = Field(1.0, description="Snapshot: time between two looks at the table.")
    min_interval: Positive = Field(
        0.5, description="Claim: time until the next look while events come; none when there are more than a batch."
    )
    max_interval: Positive = Field(2.0, description="Claim: the time doubles up to this while nothing comes.")
    notify: str = Field(
        "",
        description="Channel of a NOTIFY by the application that makes the relay look at once. Costs the writers a "
        "lock that all commits with a NOTIFY share (docs/polling.md).",
    )
    workers: int = Field(
        1, ge=1, le=64, description="Claim: sessions that publish side by side; a key always belongs to the same one."
    )
    batch: int = Field(100, ge=1, le=10_000, description="Claim: rows of one transaction, at most.")
    max_attempts: int = Field(
        5, ge=1, description="Claim: after so many rejections an event is left alone. Outages do not count."
    )
    retry_initial: Positive = Field(
        5.0, description="Claim: wait after the first rejection; doubles each time, plus up to a fifth."
    )
    retry_max: Positive = Field(300.0, description="Claim: longest wait between two tries of a rejected event.")

    @field_validator("notify")
    @classmethod
    def _channel(cls, value: str) -> str:
        if len(value.encode()) > 63:
            raise ValueError("a channel's name has at most 63 bytes")
        return value

    @model_validator(mode="after")
    def _growing(self) -> Poll:
        for low, high in (("min_interval", "max_interval"), ("retry_initial", "retry_max")):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} must not exceed {high}")
        return self


class Admin(Section):
    listen: str = Field(
        "127.0.0.1:9464", description='Address of health, metrics and status over HTTP; "" switches it off.'
    )

    @field_validator("listen")
    @classmethod
    def _address(cls, value: str) -> str:
        if value and not re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]*):\d{1,5}", value):
            raise ValueError("write host:port, [ipv6]:port or :port")
        if value and int(value.rpartition(":")[2]) > 65535:
            raise ValueError("a port is at most 65535")
        return value


class Log(Section):
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severity that is written.")
    format: Literal["auto", "json", "text"] = Field("auto", description="`auto`: text on a terminal, JSON elsewhere.")


class Config(Section):
    """Everything, validated. Later sections never look anything up by themselves."""

    relay: Relay = Field(default_factory=Relay, description="Identity.")
    database: Database = Field(default_factory=Database, description="The Postgres primary.")
    source: SourceSection = Field(default_factory=SourceSection, description="How events are read.")
    outbox: Annotated[tuple[Outbox, ...], BeforeValidator(_json)] = Field(
        default_factory=lambda: (Outbox(),), description="The outbox tables, a block each."
    )
    poll: Poll = Field(default_factory=Poll, description='Polling: `source.mode = "poll"`, and while recovering.')
    routing: Routing = Field(default_factory=Routing, description="Where events go, and in which form.")
    sink: SinkSection = Field(default_factory=SinkSection, description="The broker.")
    delivery: Delivery = Field(default_factory=Delivery, description="Windows, retries, draining.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Saving progress.")
    admin: Admin = Field(default_factory=Admin, description="HTTP endpoints.")
    log: Log = Field(default_factory=Log, description="Logging.")

    @field_validator("outbox")
    @classmethod
    def _tables(cls, value: tuple[Outbox, ...]) -> tuple[Outbox, ...]:
        if not value:
            raise ValueError("at least one [[outbox]] is needed")
        names = [outbox.table for outbox in value]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)} is listed twice")
        return value

    @model_validator(mode="after")
    def _in_time(self) -> Config:
        if self.checkpoint.interval > self.source.wal_sender_timeout / 3:
            raise ValueError("checkpoint.interval must be at most a third of source.wal_sender_timeout")
        if self.source.anchor.slot and self.source.anchor.retention > self.checkpoint.history_retention:
            raise ValueError("source.anchor.retention must not exceed checkpoint.history_retention")
        return self

    @model_validator(mode="after")
    def _identified(self) -> Config:
        routings = (self.routing, *(outbox.routing for outbox in self.outbox if outbox.routing))
        fenced = self.sink.kind == "kafka" and self.sink.kafka.mode == "exactly-once"
        if fenced and any("id" not in routing.headers for routing in routings):
            raise ValueError('sink.kafka.mode = "exactly-once" needs the header id: add it to routing.headers')
        return self

    def shown(self) -> dict[str, Any]:
        """The effective configuration with secrets masked: for `relay check` and logs."""
        shown = self.model_dump(mode="json")
        dsn = self.database.dsn
        shown["database"]["dsn"] = mask_dsn(dsn.get_secret_value()) if dsn else None
        shown["sink"]["jetstream"]["servers"] = [mask_url(url) for url in self.sink.jetstream.servers]
        options = shown["sink"]["kafka"]["options"]
        for name in options:
            if _SECRET_OPTION.search(name):
                options[name] = "********"
        return shown


def cache_folder() -> Path:
    """Where downloads (the embedded Kafka's jars) are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pg-outbox-relay"


def plain_environment() -> dict[str, str]:
    """The environment for a relay that a program starts with a file of its own: without the user's RELAY_* and PG*."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RELAY_", "PG"))}


def load(path: Path | None, environ: Mapping[str, str] | None = None) -> Config:
    """Read the file (if any), lay the environment over it, validate. Raises ConfigError with all faults."""
    faults: list[str] = []
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                [f"{path}: no such file"], hint="write one (see docs/configuration.md), or name it with --config"
            ) from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
            raise ConfigError([f"{path}: {exc}"]) from None
    faults += overlay(tree, os.environ if environ is None else environ)
    try:
        config = Config.model_validate(tree)
    except ValidationError as exc:
        for error in exc.errors(include_url=False, include_input=False):
            faults.append(_fault(error))
        raise ConfigError(faults, hint="docs/configuration.md lists every key") from None
    for routing in (config.routing, *(outbox.routing for outbox in config.outbox if outbox.routing)):
        try:
            load_schemas(routing.schemas)  # kept: the router asks for the same files
        except ConfigError as exc:
            raise ConfigError([*faults, *exc.faults], hint=exc.hint) from None
    if faults:
        raise ConfigError(faults, hint="docs/configuration.md lists every key")
    return config


def overlay(tree: dict[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Lay RELAY_SECTION__KEY over the tree; returns the faults. A misspelt section is a fault, not a default."""
    faults: list[str] = []
    sections = set(Config.model_fields)
    for name in sorted(environ):
        if not name.startswith("RELAY_"):
            continue
        path = name.removeprefix("RELAY_").lower().split("__")
        if len(path) == 1:
            section, _, key = path[0].partition("_")
            if section in sections and key:
                faults.append(
                    f"{name}: write RELAY_{section.upper()}__{key.upper()} (two underscores after the section)"
                )
            elif section in sections:
                tree[section] = environ[name]  # whole section as JSON, for lists such as RELAY_OUTBOX
            continue
        if path[0] not in sections:
            faults.append(f"{name}: unknown section; known are {', '.join(sorted(sections))}")
            continue
        if path[:3] == ["sink", "kafka", "options"] and len(path) == 4:
            path[3] = path[3].replace("_", ".")
        node = tree
        for step in path[:-1]:
            child = node.setdefault(step, {})
            if not isinstance(child, dict):
                faults.append(f"{name}: {step} is a list; set the whole of it as JSON in RELAY_{path[0].upper()}")
                break
            node = child
        else:
            node[path[-1]] = environ[name]
    return faults


def _fault(error: Any) -> str:
    path = ".".join(str(step) for step in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    match error["type"]:
        case "extra_forbidden":
            message = "unknown key"
        case "missing":
            message = "is required"
    return f"{path}: {message}" if path else message


def read_secret(path: Path) -> str:
    """The content of a secret's file, without the newline that editors add."""
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError([f"{path}: cannot read the secret: {exc}"]) from None


def mask_dsn(dsn: str) -> str:
    """The DSN as key=value pairs, with secrets masked."""
    parts = conninfo_to_dict(dsn)
    return make_conninfo("", **{k: "********" if re.search("password|secret", k) else v for k, v in parts.items()})


def mask_url(url: str) -> str:
    """Everything up to the last @ is masked: a password may itself hold what should have been escaped."""
    return re.sub(r"^([a-z]+://)?.*@", r"\1********@", url)


def _unreadable(exc: ProgrammingError) -> str:
    # libpq quotes what it could not read, and that may be a piece of the password.
    reason = re.sub(r'".*"', '"…"', str(exc).strip(), flags=re.DOTALL)
    return f"not a connection string: {reason}"
