"""The section about the broker: JetStream, Kafka."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from relay.config.checked import BeforeValidator, Field, SecretStr, field_validator, model_validator
from relay.config.secret import mask_url, read_secret
from relay.config.section import Duration, Positive, Section, Words, parsed


class Stream(Section):
    name: str = Field(description="Name of the JetStream stream.")
    subjects: Words = Field(
        description="Subjects of the stream; an event goes to the stream whose subject matches its topic."
    )
    create: bool = Field(False, description="Create the stream when it is missing.")
    replicas: int = Field(1, ge=1, le=5, description="Replicas of a stream that the relay creates.")
    max_age: Duration = Field(0.0, description="Age limit of a stream that the relay creates; 0 keeps for ever.")
    duplicate_window: Positive | None = Field(
        None,
        description="Dedupe window of a stream that the relay creates. By default two minutes; where the stream is "
        "fenced, which does without, two `ack_timeout`s.",
    )

    @field_validator("name")
    @classmethod
    def _stream_name(cls, value: str) -> str:
        if not value or any(c.isspace() or c in ".*>/\\" for c in value):
            raise ValueError("a stream name has no spaces and none of . * > / \\")
        return value

    @field_validator("subjects")
    @classmethod
    def _some(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("at least one subject is needed")
        for subject in value:
            tokens = subject.split(".")
            if "" in tokens or ">" in tokens[:-1] or any(c.isspace() for c in subject):
                raise ValueError(f"{subject!r} is not a subject: tokens between dots, no spaces, > only as the last")
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
    streams: Annotated[tuple[Stream, ...], BeforeValidator(parsed)] = Field(
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


def legal_topic(name: str) -> bool:
    """Kafka's rule."""
    return re.fullmatch(r"[A-Za-z0-9._-]{1,249}", name) is not None and name not in {".", ".."}


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
        -1, ge=-1, le=100_000, description="Partitions of topics that the relay creates; -1 is the broker's default."
    )
    replication_factor: int = Field(
        -1, ge=-1, le=10_000, description="Replicas of topics that the relay creates; -1 is the broker's default."
    )
    connect_timeout: Positive = Field(10.0, description="Longest wait for the brokers' metadata.")
    options: Annotated[dict[str, KafkaOption], BeforeValidator(parsed)] = Field(
        default_factory=_local_kafka,
        repr=False,  # like `servers`, it may hold a secret in plain text
        description='librdkafka\'s own names, passed through; `{ file = "…" }` reads a secret. '
        "In the environment write `_` for `.`.",
    )

    @field_validator("position_topic", "topics")
    @classmethod
    def _legal(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for name in (value,) if isinstance(value, str) else value:
            if not legal_topic(name):
                raise ValueError(f"{name!r} is not a topic: at most 249 letters, digits, dots, underscores and hyphens")
        return value

    @field_validator("partitions", "replication_factor")
    @classmethod
    def _not_none(cls, value: int) -> int:
        if value == 0:
            raise ValueError("must be at least 1, or -1 for the broker's default")
        return value

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
