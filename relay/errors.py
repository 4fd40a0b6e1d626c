"""Every error the relay raises on purpose. The class is the decision: what the process does next.

    RelayError                        exit
    ├── ConfigError                     2    refuse to start; all faults at once
    ├── TransientError                  1    wait with backoff, try again, for ever
    │   ├── SourceUnavailable                Postgres cannot be reached, or closed the connection
    │   ├── SinkUnavailable                  the broker cannot be reached, or did not answer in time
    │   ├── SlotBusy                         another session uses the slot: stand by
    │   ├── Superseded                       another relay took over (higher epoch): stand by
    │   ├── SlotGivenUp                      the slot held more WAL than allowed: poll, then make a new one
    │   └── StreamIncomplete                 the table holds rows that the stream did not bring: publish them from it
    ├── OperatorError                   3    stop; the hint says what to do
    │   ├── SetupError                       something the relay needs was not set up
    │   ├── SlotLost                         the slot is gone, invalidated or was moved
    │   ├── ContractError                    the outbox table is not what the config says
    │   ├── AuthError                        credentials or rights are refused
    │   └── EventRejected                    the sink can never take this event
    └── ProtocolError                   1    bytes we do not understand: a bug or an unknown server; stop

Each class has a heading of the same name in docs/operations.md. Foreign exceptions are translated once, at the edge
(`source/`, `sink/`); above that line nobody imports psycopg, confluent_kafka or nats to catch something.
"""

from __future__ import annotations

from collections.abc import Sequence


class RelayError(Exception):
    """Base of all: a sentence that says what is wrong, and a hint that says what to do."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class ConfigError(RelayError):
    """The configuration or the command line is wrong; carries every fault that was found."""

    exit_code = 2

    def __init__(self, faults: Sequence[str], *, hint: str = "") -> None:
        super().__init__("; ".join(faults), hint=hint)
        self.faults = list(faults)


class TransientError(RelayError):
    """Trying again later may cure it."""


class SourceUnavailable(TransientError):
    """Postgres cannot be reached, is shutting down, or closed the connection."""


class SinkUnavailable(TransientError):
    """The broker cannot be reached, refuses for now, or did not acknowledge in time."""


class SlotBusy(TransientError):
    """Another session streams from the slot."""


class Superseded(TransientError):
    """Another relay of the same name took over: its epoch is higher than ours."""


class SlotGivenUp(TransientError):
    """The slot held more WAL than `source.max_retained_wal` allows, and is given up on purpose."""


class StreamIncomplete(TransientError):
    """The audit found rows in the table that the stream did not bring; they are published from the table."""

    def __init__(
        self,
        message: str,
        *,
        since: str,
        until: str,
        until_lsn: str,
        xids: Sequence[int] | None,
        counted: int,
        hint: str = "",
    ) -> None:
        super().__init__(message, hint=hint)
        self.since, self.until, self.until_lsn = since, until, until_lsn  # the window, by its snapshots
        self.xids = None if xids is None else tuple(xids)  # transactions that lack rows; None: cannot be told apart
        self.counted = counted  # events that the stream brought of it


class OperatorError(RelayError):
    """Only a person can cure it; the hint says how."""

    exit_code = 3


class SetupError(OperatorError):
    """Something that the relay needs was not set up: wal_level, publication, stream, topic."""


class SlotLost(OperatorError):
    """The slot is missing, invalidated, or was moved by somebody else."""


class ContractError(OperatorError):
    """The outbox table is not what the configuration promised."""


class AuthError(OperatorError):
    """Credentials or rights are refused."""


class EventRejected(OperatorError):
    """The sink can never take this event."""


class ProtocolError(RelayError):
    """The server sent bytes that we cannot understand."""


def decisive(exc: BaseException) -> RelayError:
    """Of errors that happened together the one that decides. What is not ours is a bug, and goes up as it is."""
    leaves: list[BaseException] = []
    stack = [exc]
    while stack:
        each = stack.pop()
        if isinstance(each, BaseExceptionGroup):
            stack.extend(each.exceptions)
        else:
            leaves.append(each)
    ours = [leaf for leaf in leaves if isinstance(leaf, RelayError)]
    if len(ours) < len(leaves):
        raise exc
    return max(ours, key=_severity)


def _severity(failure: RelayError) -> int:
    if not isinstance(failure, TransientError):
        return 3 if isinstance(failure, OperatorError) else 4
    return 2 if isinstance(failure, Superseded | StreamIncomplete) else 1
