"""What the Kafka sink decides without a broker: its librdkafka options, and what each error means. Pure.

The defaults are what the promises rest on; an option that would break one is a ConfigError, never a warning. An error
code that nobody classified means stop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import KafkaError

from relay.errors import (
    AuthError,
    ConfigError,
    EventRejected,
    OperatorError,
    ProtocolError,
    RelayError,
    SetupError,
    SinkUnavailable,
)
from relay.sink.kafka_partition import HASHES

Option = bool | int | float | str

DEFAULTS: dict[str, Option] = {
    "enable.idempotence": True,
    "acks": "all",
    "enable.gapless.guarantee": True,  # without it, what was sent behind a refused message set lands before it
    "delivery.timeout.ms": 0,  # infinite: a finite one drops events and goes on behind the gap
    "partitioner": "murmur2_random",  # the partitions that Java clients choose
    "compression.type": "lz4",
    "linger.ms": 0,  # batches grow by themselves while others are on their way to the partition (ADR 0015)
    "socket.nagle.disable": True,  # else a small request waits until the answer to the one before is there
    "max.in.flight.requests.per.connection": 3,  # what comes meanwhile travels together (ADR 0021)
    "statistics.interval.ms": 0,
}

# librdkafka knows several options by two names; ours and the user's must meet under one.
_ALIASES = {
    "request.required.acks": "acks",
    "message.timeout.ms": "delivery.timeout.ms",
    "message.send.max.retries": "retries",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "queue.buffering.max.ms": "linger.ms",
    "compression.codec": "compression.type",
    "metadata.broker.list": "bootstrap.servers",
}


def _off(value: Option) -> bool:
    return str(value).lower() in {"false", "0", "f"}


def _number(value: Option) -> float:
    try:
        return float(value)
    except ValueError:
        return 0.0  # librdkafka itself names what is no number


# option → (does this value break a promise?, why)
_FORBIDDEN: dict[str, tuple[Callable[[Option], bool], str]] = {
    "enable.idempotence": (_off, "retries would duplicate and reorder events"),
    "enable.gapless.guarantee": (_off, "events behind a refused one would become durable before it"),
    "acks": (lambda v: str(v).lower() not in {"all", "-1"}, "only all means durable"),
    "delivery.timeout.ms": (lambda v: _number(v) != 0, "events that time out are dropped; 0 is for ever"),
    "retries": (lambda v: _number(v) < 2**31 - 1, "events that run out of retries are dropped; leave it out"),
    "max.in.flight.requests.per.connection": (lambda v: _number(v) > 5, "more than 5 lose their order"),
    "transactional.id": (lambda _: True, "belongs to the relay"),
    "partitioner": (lambda v: str(v) not in HASHES, "events of one key need one partition, and we must know which"),
    "delivery.report.only.error": (lambda v: not _off(v), "the relay counts acknowledgements"),
}


def producer_options(user: Mapping[str, Option]) -> dict[str, Option]:
    """Our defaults, overridden and extended by the user's options. Raises ConfigError with all faults."""
    faults: list[str] = []
    options = dict(DEFAULTS)
    given: dict[str, str] = {}
    for name, value in user.items():
        plain = _ALIASES.get(name, name)
        if plain in given:
            faults.append(f"sink.kafka.options.{name}: is another name of {given[plain]}, give one of them")
        given[plain] = name
        breaks, why = _FORBIDDEN.get(plain, (None, ""))
        if breaks is not None and breaks(value):
            faults.append(f"sink.kafka.options.{name}: {value} cannot be used: {why}")
        options[plain] = value
    if "OAUTHBEARER" in (options.get("sasl.mechanism"), options.get("sasl.mechanisms")):
        unsecured = not _off(options.get("enable.sasl.oauthbearer.unsecure.jwt", False))
        if str(options.get("sasl.oauthbearer.method", "")).lower() != "oidc" and not unsecured:
            # librdkafka would wait for a token for ever, and say nothing
            faults.append('sink.kafka.options.sasl.oauthbearer.method: OAUTHBEARER needs "oidc" and its endpoint')
    if not str(options.get("bootstrap.servers", "")).strip():
        faults.append("sink.kafka.options.bootstrap.servers: is required")
    if faults:
        raise ConfigError(
            faults, hint="leave these options out; docs/configuration.md says which ones are the relay's own"
        )
    return options


def topic_missing(names: list[str]) -> SetupError:
    """One remedy per topic, to paste."""
    listed = ", ".join(names)
    commands = "; ".join(f"kafka-topics.sh --bootstrap-server … --create --topic {name}" for name in names)
    noun = "topic" if len(names) == 1 else "topics"
    return SetupError(
        f"Kafka has no {noun} {listed}, or does not show {'it' if len(names) == 1 else 'them'} to us",
        hint=f"create: {commands}; or set sink.kafka.create_topics = true; with ACLs, allow DESCRIBE and WRITE",
    )


_E = KafkaError
_AUTH_HINT = "check security.protocol, sasl.* and ssl.* in sink.kafka.options, and the user's rights: WRITE, DESCRIBE"
_CERTIFICATE = re.compile(r"certificate verify failed|tls alert|SSL alert number", re.IGNORECASE)  # else it restarts
_DENIED = re.compile(r"invalid|unauthorized|denied", re.IGNORECASE)
_TOPIC_HINT = "create the topic, or set sink.kafka.create_topics = true"

_MISSING = (_E.UNKNOWN_TOPIC_OR_PART, _E.UNKNOWN_TOPIC_ID, _E._UNKNOWN_TOPIC, _E._UNKNOWN_PARTITION)  # noqa: SLF001

# What the broker (or librdkafka) says → what we do. Whatever is not here is judged by librdkafka's own flag, and stops
# the relay when that does not say "retriable".
_CLASSES: dict[int, tuple[type[RelayError], str]] = {
    **dict.fromkeys(
        (_E.MSG_SIZE_TOO_LARGE, _E.RECORD_LIST_TOO_LARGE, _E.INVALID_RECORD, _E.INVALID_MSG_SIZE),
        (EventRejected, "the topic can never take this event: see its max.message.bytes and cleanup.policy"),
    ),
    **dict.fromkeys(
        (
            _E.TOPIC_AUTHORIZATION_FAILED,
            _E.CLUSTER_AUTHORIZATION_FAILED,
            _E.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
            _E.SASL_AUTHENTICATION_FAILED,
            _E.UNSUPPORTED_SASL_MECHANISM,
            _E.ILLEGAL_SASL_STATE,
            _E._AUTHENTICATION,  # noqa: SLF001  librdkafka's own codes begin with an underscore
        ),
        (AuthError, _AUTH_HINT),
    ),
    **dict.fromkeys((*_MISSING, _E.TOPIC_EXCEPTION), (SetupError, _TOPIC_HINT)),
    _E.INVALID_TRANSACTION_TIMEOUT: (
        SetupError,
        'lower "transaction.timeout.ms" in sink.kafka.options, or raise transaction.max.timeout.ms of the brokers',
    ),
    _E.INVALID_PARTITIONS: (SetupError, "change sink.kafka.partitions: at least 1, or -1 for the broker's default"),
    _E.INVALID_REPLICATION_FACTOR: (
        SetupError,
        "change sink.kafka.replication_factor: at most as many as there are brokers, or -1 for the broker's default",
    ),
    _E.POLICY_VIOLATION: (OperatorError, "a policy of the cluster forbids it: ask its administrators"),
    _E.INVALID_TIMESTAMP: (
        OperatorError,
        "the clocks of relay and broker differ, or the topic's timestamp limits are too narrow",
    ),
    _E.INVALID_REQUIRED_ACKS: (OperatorError, "the topic does not take acks=all"),
    _E.UNSUPPORTED_COMPRESSION_TYPE: (OperatorError, 'set "compression.type" to one the broker knows'),
    _E.UNSUPPORTED_VERSION: (OperatorError, "the broker is too old for idempotent producers (Kafka ≥ 0.11)"),
    _E._UNSUPPORTED_FEATURE: (OperatorError, "the broker is too old for idempotent producers (Kafka ≥ 0.11)"),  # noqa: SLF001
    **dict.fromkeys(
        (
            _E._TRANSPORT,  # noqa: SLF001
            _E._ALL_BROKERS_DOWN,  # noqa: SLF001
            _E._RESOLVE,  # noqa: SLF001
            _E._SSL,  # noqa: SLF001
            _E._TIMED_OUT,  # noqa: SLF001
            _E._TIMED_OUT_QUEUE,  # noqa: SLF001
            _E._MSG_TIMED_OUT,  # noqa: SLF001
            _E._PURGE_QUEUE,  # noqa: SLF001  we let go of it ourselves: closed, or another event failed
            _E._PURGE_INFLIGHT,  # noqa: SLF001
            _E._DESTROY,  # noqa: SLF001
            _E._NOENT,  # noqa: SLF001  "no leaders found", when the ends of partitions are asked for
            # A producer session that ended; a new one cures it.
            _E._FATAL,  # noqa: SLF001
            _E._GAPLESS_GUARANTEE,  # noqa: SLF001
            _E._INCONSISTENT,  # noqa: SLF001  see `fault`
            _E.OUT_OF_ORDER_SEQUENCE_NUMBER,
            _E.UNKNOWN_PRODUCER_ID,
            _E.INVALID_PRODUCER_EPOCH,
            _E.INVALID_PRODUCER_ID_MAPPING,
            _E.INVALID_TXN_STATE,
            _E.TRANSACTION_COORDINATOR_FENCED,
            _E.NOT_ENOUGH_REPLICAS,
            _E.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
            _E.KAFKA_STORAGE_ERROR,
            _E.REQUEST_TIMED_OUT,
            _E.THROTTLING_QUOTA_EXCEEDED,
            _E.NETWORK_EXCEPTION,
            _E.NOT_LEADER_FOR_PARTITION,
            _E.LEADER_NOT_AVAILABLE,
            _E.FENCED_LEADER_EPOCH,
            _E.UNKNOWN_LEADER_EPOCH,
            _E.COORDINATOR_LOAD_IN_PROGRESS,
            _E.COORDINATOR_NOT_AVAILABLE,
            _E.NOT_COORDINATOR,
            _E.CONCURRENT_TRANSACTIONS,
        ),
        (SinkUnavailable, "is the broker up, and its disk not full?"),
    ),
}

# Consequences of another error, which says more.
CONSEQUENCES = frozenset(
    (_E._FATAL, _E._GAPLESS_GUARANTEE, _E._PURGE_QUEUE, _E._PURGE_INFLIGHT, _E._DESTROY)  # noqa: SLF001
)


def fault(error: Any, message: Any) -> Any:
    """What a delivery report says against the event; None: a broker has told where it stored it.

    librdkafka reports success without an offset, too: when an event was turned away and one behind it was taken, it
    infers that the first must have been stored before. A broker that does not know the producer yet (a new partition, a
    new leader without its state) takes what comes first, whatever its sequence number, and the inference is wrong.
    """
    if error is None and message.offset() is None:
        return _E(_E._INCONSISTENT, "acknowledged without an offset")  # noqa: SLF001
    return error


def translate(error: Any, doing: str) -> RelayError:
    """The relay's error for a KafkaError: the only place where codes become decisions."""
    text = f"{doing}: {error.str()} ({error.name()})"
    known = _CLASSES.get(error.code())
    if error.code() in (_E._SSL, _E._TRANSPORT) and _CERTIFICATE.search(error.str()):  # noqa: SLF001
        return AuthError(text, hint=_AUTH_HINT)
    if "OAUTHBEARER token" in error.str() and not _DENIED.search(error.str()):
        return SinkUnavailable(text, hint="can the relay reach sasl.oauthbearer.token.endpoint.url?")
    if known is not None:
        kind, hint = known
        return kind(text, hint=hint)
    if error.retriable():
        return SinkUnavailable(text)
    return ProtocolError(text, hint="an error the relay does not know: it stops rather than guess; nothing is lost")


def translate_event(error: Any, topic: str) -> RelayError:
    """The same for an event that was not taken.

    A topic that was there and is gone is looked for by the next session, which makes or names it before it sends.
    """
    doing = f"Kafka did not take an event of topic {topic}"
    if error.code() in _MISSING:
        return SinkUnavailable(f"{doing}: {error.str()} ({error.name()})", hint="was the topic deleted?")
    return translate(error, doing)


_FENCED = frozenset((_E._FENCED, _E.PRODUCER_FENCED, _E.INVALID_PRODUCER_EPOCH))  # noqa: SLF001


def translate_transaction(error: Any, doing: str) -> RelayError:
    """The same for the transactional API: a transaction that cannot go on, or was taken from us, is tried anew."""
    text = f"{doing}: {error.str()} ({error.name()})"
    if error.code() in _FENCED:
        # The broker takes the epoch away in both cases, and librdkafka tells them by the same codes.
        return SinkUnavailable(
            f"{text}: another producer took over our transactional id, or the broker aborted a transaction of ours "
            "that took longer than transaction.timeout.ms",
            hint="if another relay took over that should not, give each its own relay.name or "
            'sink.kafka.transactional_id; if there is none, raise "transaction.timeout.ms" in sink.kafka.options or '
            "lower sink.kafka.transaction_events",
        )
    failure = translate(error, doing)
    stopped = error.code() == _E._STATE  # noqa: SLF001  it failed, or was ended: a new session knows where it stands
    if type(failure) is ProtocolError and (stopped or error.txn_requires_abort() or error.fatal()):
        return SinkUnavailable(text)
    return failure


def session_options(options: Mapping[str, Option], *, careful: bool, plugin: str | None) -> dict[str, Option]:
    """Of the options for an idempotent producer those for one session; `plugin`: what librdkafka shall load for us."""
    kept = dict(options)
    kept["debug"] = ",".join(filter(None, (str(kept.get("debug", "")), "eos")))  # it says when the producer id is there
    if careful:
        kept["enable.gapless.guarantee"] = False  # one at a time leaves no gaps, and a refusal is not the end
    if plugin is not None:
        plugins = (kept.get("plugin.library.paths"), plugin)
        kept["plugin.library.paths"] = ";".join(str(path) for path in plugins if path)
    return kept


def transactional_options(options: Mapping[str, Option], user: Mapping[str, Option], name: str) -> dict[str, Option]:
    """Of the options for an idempotent producer those for a transactional one."""
    kept = dict(options)
    del kept["enable.gapless.guarantee"]  # a gap ends the transaction, not the producer
    if not {"delivery.timeout.ms", "message.timeout.ms"} & user.keys():
        del kept["delivery.timeout.ms"]  # librdkafka then takes the transaction's timeout
    return {**kept, "transactional.id": name}


def transactional_id(origin: str) -> str:
    """ACLs name it: plain characters only."""
    return "outbox-relay-" + re.sub(r"[^A-Za-z0-9._-]", "-", origin)
