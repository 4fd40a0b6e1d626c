"""The root, `Config`, and the sections about the process: identity, delivery, HTTP, logging."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from relay.config.checked import BeforeValidator, Field, field_validator, model_validator
from relay.config.outbox import Outbox, Routing
from relay.config.postgres import Checkpoint, Database, Poll, SourceSection
from relay.config.secret import SECRET_OPTION, mask_dsn, mask_url
from relay.config.section import Positive, Section, Size, parsed, plain
from relay.config.sink import SinkSection


class Relay(Section):
    name: str = Field(
        "outbox_relay",
        description="Names this relay: its lock, its checkpoint, its transactional id. One per database and purpose.",
    )
    service: str = Field("", description="The label `service` of all metrics; the relay's name if empty.")

    _plain = field_validator("name")(plain)


class Delivery(Section):
    max_in_flight_events: int = Field(
        5000,
        ge=1,
        le=50_000,
        description="Events read but not yet acknowledged, at most. With Kafka (idempotent) as many of them as the "
        "brokers' round trip needs.",
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
    outbox: Annotated[tuple[Outbox, ...], BeforeValidator(parsed)] = Field(
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
            if SECRET_OPTION.search(name):
                options[name] = "********"
        return shown
