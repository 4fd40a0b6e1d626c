"""The table contract: which column plays which part, for one outbox table.

`Mapping` says it by name (from the config); `Binding` by position (from what Postgres says the table looks like now).
A row is a list of text cells in the order of `FIELDS`, then the header columns: from the WAL and from a SELECT alike.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from relay.config import Outbox
from relay.errors import ContractError

FIELDS = (
    "seq",
    "id",
    "aggregate_type",
    "aggregate_id",
    "event_type",
    "topic",
    "partition_key",
    "payload",
    "headers",
    "created_at",
    "stream",
)
SEQ, ID, AGGREGATE_TYPE, AGGREGATE_ID, EVENT_TYPE = range(5)
TOPIC, PARTITION_KEY, PAYLOAD, HEADERS, CREATED_AT, STREAM = range(5, 11)

Cell = bytes | None  # a value in Postgres' text form
Row = Sequence[Cell]

UUID, JSON, JSONB, BYTEA = 2950, 114, 3802, 17
TIMESTAMP, TIMESTAMPTZ = 1114, 1184
NUMBERS = frozenset({20, 21, 23, 26, 5069})  # bigint, smallint, integer, oid, xid8


@dataclass(frozen=True, slots=True)
class Mapping:
    """One outbox table, by names."""

    table: str
    ordinal: int  # place in the config: identifies the table in positions
    columns: tuple[str, ...]  # column of each part; "" where the table has none
    header_names: tuple[str, ...]
    xid_column: str
    several: bool  # more than one table: ids that are not UUIDs get the table's name in front
    optional: frozenset[str] = frozenset()  # columns that the table may do without: nobody named them explicitly

    @classmethod
    def of(cls, outbox: Outbox, ordinal: int, *, several: bool) -> Mapping:
        parts = tuple(getattr(outbox.columns, field) for field in FIELDS)
        unsaid = {"seq", "xid"} - outbox.columns.model_fields_set
        return cls(
            table=outbox.table,
            ordinal=ordinal,
            columns=parts + tuple(outbox.header_columns.values()),
            header_names=tuple(outbox.header_columns),
            xid_column=outbox.columns.xid,
            several=several,
            optional=frozenset(getattr(outbox.columns, field) for field in unsaid),
        )

    def within(self, existing: Collection[str]) -> Mapping:
        """The mapping as far as the table has its columns: without `seq` and `xid` where it was not adopted."""
        gone = {column for column in self.optional if column not in existing}
        return replace(
            self,
            columns=tuple("" if column in gone else column for column in self.columns),
            xid_column="" if self.xid_column in gone else self.xid_column,
            optional=frozenset(),
        )

    @property
    def recoverable(self) -> bool:
        """Whether rows can be found again in the table: that needs their transaction and their order."""
        return bool(self.xid_column and self.columns[SEQ])

    def bind(self, columns: Sequence[tuple[str, int]]) -> Binding:
        """Find the parts in `columns` (name, type OID), the table's columns in Postgres' order."""
        names = [name for name, _ in columns]
        if not self.optional.issubset(names):
            return self.within(names).bind(columns)
        missing = [column for column in self.columns if column and column not in names]
        if missing:
            raise ContractError(
                f"{self.table} has no column {', '.join(missing)} (it has {', '.join(names)})",
                hint='name the right columns under [outbox.columns] ("" for a part that the table does not have), '
                "or see that the publication hides none of them, by a column list or as a generated column",
            )
        # One column may play several parts (id as partition key, say): the first part's place holds the value.
        first = {column: place for place, column in reversed(list(enumerate(self.columns))) if column}
        types = dict(columns)
        return Binding(
            mapping=self,
            slots=tuple(first.get(name, -1) for name in names),
            width=len(self.columns),
            copies=tuple((first[c], place) for place, c in enumerate(self.columns) if c and first[c] != place),
            types=tuple(types[column] if column else 0 for column in self.columns),
        )


@dataclass(frozen=True, slots=True)
class Binding:
    """One outbox table, by positions. Valid until Postgres announces the relation anew."""

    mapping: Mapping
    slots: tuple[int, ...]  # place in the row of each column, -1: not wanted
    width: int
    copies: tuple[tuple[int, int], ...]  # (from, to): parts that share a column
    types: tuple[int, ...]  # type OID of each place, 0 where there is no column


Values = dict[str, bool | str]


@dataclass(frozen=True, slots=True)
class ClaimColumns:
    """How a table is claimed: which rows are open, and where their fate is noted. "" where the table has no column."""

    unpublished: Values
    write_back: Values
    attempts: str
    next_attempt: str
    last_error: str
    failed: Values

    @classmethod
    def of(cls, outbox: Outbox, existing: Collection[str]) -> ClaimColumns:
        """Raises ContractError. The default table's `published_at` needs no words."""
        unpublished: Values = dict(outbox.unpublished)
        if not unpublished and "published_at" in existing:
            unpublished = {"published_at": "NULL"}
        write_back: Values = dict(outbox.write_back)
        if not write_back and unpublished.get("published_at") == "NULL":
            write_back = {"published_at": "now()"}
        if not any(column in write_back and write_back[column] != value for column, value in unpublished.items()):
            raise ContractError(
                f"{outbox.table} cannot be claimed: nothing says which rows are unpublished, and what marks the others",
                hint="say it in outbox.unpublished and outbox.write_back, for example "
                'unpublished = { sent_at = "NULL" }, write_back = { sent_at = "now()" }',
            )
        claim = outbox.claim
        if claim.failed and not any(column in claim.failed for column in unpublished):
            raise ContractError(
                f"{outbox.table}: outbox.claim.failed leaves a row unpublished, so it would be tried for ever",
                hint=f"set one of {', '.join(unpublished)} in it",
            )
        parts = {part: getattr(claim, part) for part in ("attempts", "next_attempt", "last_error")}
        for part, column in parts.items():  # what nobody named explicitly is used where it exists
            if part not in claim.model_fields_set and column not in existing:
                parts[part] = ""
        found = cls(unpublished, write_back, **parts, failed=dict(claim.failed))
        missing = [column for column in (*unpublished, *found.written) if column not in existing]
        if missing:
            raise ContractError(
                f"{outbox.table} has no column {', '.join(dict.fromkeys(missing))} (it has {', '.join(existing)})",
                hint='name the right columns under [outbox.claim] ("" for a part that the table does not have), in '
                "outbox.unpublished and in outbox.write_back",
            )
        return found

    @property
    def written(self) -> tuple[str, ...]:
        """Columns that claiming sets."""
        noted = (column for column in (self.attempts, self.next_attempt, self.last_error) if column)
        return tuple(dict.fromkeys((*self.write_back, *noted, *self.failed)))


def mappings(outboxes: Sequence[Outbox]) -> tuple[Mapping, ...]:
    return tuple(Mapping.of(outbox, i, several=len(outboxes) > 1) for i, outbox in enumerate(outboxes))
