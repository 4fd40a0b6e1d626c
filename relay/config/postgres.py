"""The sections about Postgres: the database, how events are read from it, and how progress is saved in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from relay.config.checked import BeforeValidator, Field, SecretStr, field_validator, model_validator
from relay.config.secret import read_secret, unreadable
from relay.config.section import Positive, Section, Size, plain, size
from relay.errors import ConfigError


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
                raise ValueError(unreadable(exc)) from None
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
            raise ConfigError([f"database.dsn_file: {unreadable(exc)}"]) from None


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
        return value and plain(value)


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
    max_retained_wal: Annotated[int, BeforeValidator(size), Field(ge=0)] = Field(
        0,
        description="When the slot holds more WAL than this, give it up, catch up from the table, and make a new one: "
        "saves the primary's disk. 0: the slot is kept until Postgres ends it.",
    )
    wal_sender_timeout: Positive = Field(
        15.0,
        le=2_147_483,  # what Postgres counts in milliseconds
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

    _slot = field_validator("slot")(plain)

    @field_validator("publication")
    @classmethod
    def _publication(cls, value: str) -> str:
        if not 0 < len(value.encode()) <= 63:
            raise ValueError("a publication's name has 1 to 63 bytes")
        return value

    @model_validator(mode="after")
    def _two_slots(self) -> SourceSection:
        if self.anchor.slot == self.slot:
            raise ValueError("anchor.slot must be another slot than slot")
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
    batch: int = Field(300, ge=1, le=10_000, description="Claim: rows of one transaction, at most.")
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
