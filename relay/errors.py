"""Every error the relay raises on purpose. The class is the decision: what the process does next.

    RelayError                        exit
    ├── ConfigError                     2    refuse to start; all faults at once
    ├── TransientError                  1    wait with backoff, try again, for ever
    │   ├── SourceUnavailable                Postgres cannot be reached, or closed the connection
    │   ├── SinkUnavailable                  the broker cannot be reached, or did not answer in time
    │   ├── SlotBusy                         another session uses the slot: stand by
    │   └── Superseded                       another relay took over (higher epoch): stand by
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
