"""The sections about the outbox tables: their columns, and where their events go in which form."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from relay.config.checked import BeforeValidator, Field, field_validator, model_validator
from relay.config.section import Section, Words, parsed
from relay.presets import applied

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
_FIELD = re.compile(r"\{([^{}]*)\}")


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
    schemas: Annotated[dict[str, Path], BeforeValidator(parsed)] = Field(
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
