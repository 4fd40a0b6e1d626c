"""Every metric of the relay, in one place: prefix `relay_`, base units, labels from small closed sets only.

The pipeline bumps plain attributes of `Progress`; a scrape reads them. Only the two histograms are observed as things
happen, once per batch. Nothing is global: each `Metrics` owns its registry. docs/metrics.md explains every name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from relay import __version__
from relay.lsn import LSN
from relay.progress import Progress, State

STATES: tuple[str, ...] = get_args(State)
WAL_STATUSES = ("reserved", "extended", "unreserved", "lost")
STAGES = ("received", "acknowledged", "confirmed", "server")

# From half a millisecond (an idle relay beside its broker) to a minute; 5 s and 30 s are thresholds of alerts.
BUCKETS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60,
)  # fmt: skip


@dataclass(slots=True)
class Gauges:
    """What only a query can tell; the supervisor refreshes it every few seconds. None: not known, not exported."""

    pending_events: int | None = None  # rows that the checkpoint's snapshot does not see
    oldest_pending_age_seconds: float | None = None
    average_pending_age_seconds: float | None = None
    dead_letters: int | None = None
    parked_events: int | None = None  # waiting behind a dead letter of their key
    slot_name: str | None = None
    slot_active: bool | None = None
    slot_wal_status: str | None = None
    slot_retained_bytes: int | None = None  # WAL that Postgres keeps for the slot
    slot_safe_wal_bytes: int | None = None  # WAL that may still be written before the slot is lost
    anchor_retained_bytes: int | None = None  # WAL that Postgres keeps for exact replays


# Attribute of Progress, metric, help.
_COUNTERS = (
    ("received_events", "relay_events_received", "Events received from Postgres."),
    ("received_transactions", "relay_transactions_received", "Transactions with events received from Postgres."),
    ("published_events", "relay_events_published", "Events that the sink acknowledged."),
    ("published_bytes", "relay_published_bytes", "Bytes of events that the sink acknowledged."),
    ("skipped_events", "relay_events_skipped", "Events skipped because the checkpoint already covers them."),
    ("recovered_events", "relay_events_recovered", "Events published from the table."),
    ("replayed_events", "relay_events_replayed", "Events that the relay published again, on request."),
    ("duplicate_events", "relay_events_duplicate", "Events that the sink already held."),
    ("rejected_events", "relay_events_rejected", "Events that the sink can never take."),
    ("publish_attempts", "relay_publish_attempts", "Events handed to the sink, retries included."),
    ("publish_failures", "relay_publish_failures", "Events of batches that failed; they are tried again."),
    ("recoveries", "relay_recoveries", "Recoveries from the table."),
    ("audits", "relay_audits", "Windows of the stream that were compared with the table."),
    ("audit_failures", "relay_audit_failures", "Audits in which the stream lacked rows of the table."),
    ("checkpoints", "relay_checkpoints", "Checkpoints saved."),
)

# Attribute of Gauges, metric, help.
_GAUGES = (
    ("pending_events", "relay_pending_events", "Committed events that no checkpoint covers yet."),
    ("oldest_pending_age_seconds", "relay_oldest_pending_age_seconds", "Age of the oldest pending event."),
    ("average_pending_age_seconds", "relay_average_pending_age_seconds", "Mean age of the pending events."),
    ("dead_letters", "relay_dead_letters", "Rejected events that wait for an operator."),
    ("parked_events", "relay_parked_events", "Events that wait behind a dead letter of their key."),
    ("slot_active", "relay_slot_active", "1 if a session streams from the slot."),
    ("slot_retained_bytes", "relay_slot_retained_bytes", "WAL that Postgres keeps for the slot."),
    ("slot_safe_wal_bytes", "relay_slot_safe_wal_bytes", "WAL that may be written before the slot is lost."),
    ("anchor_retained_bytes", "relay_anchor_retained_bytes", "WAL that Postgres keeps for the anchor slot."),
)


class Metrics:
    """The relay's registry. Every `relay_` series carries the labels `relay` and `service`."""

    def __init__(self, progress: Progress, *, relay_name: str, service: str = "", stalled_after: float = 30.0) -> None:
        self.progress = progress
        self.gauges = Gauges()
        self.relay_name = relay_name
        self.stalled_after = stalled_after
        self.labels = {"relay": relay_name, "service": service or relay_name}
        self.registry = CollectorRegistry()
        self.registry.register(_ProgressCollector(self))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._delivery = self._histogram(
            "relay_delivery_seconds", "From commit in Postgres to the sink's acknowledgement; a batch's oldest event."
        )
        self._publish = self._histogram(
            "relay_publish_seconds", "From handing a batch to the sink to its acknowledgement."
        )
        self._errors = Counter(
            "relay_errors", "Errors by class (docs/operations.md).", [*self.labels, "error"], registry=self.registry
        )

    def observe(self, delivery: float | None, publish: float) -> None:
        """A batch was acknowledged: so many seconds after its oldest event's commit, and after the sink got it."""
        if delivery is not None:
            self._delivery.observe(max(0.0, delivery))  # two machines, two clocks
        self._publish.observe(publish)

    def failed(self, error: BaseException) -> None:
        """Something went wrong; counted by the class, which is the decision."""
        self._errors.labels(*self.labels.values(), type(error).__name__).inc()

    def _histogram(self, name: str, text: str) -> Histogram:
        family = Histogram(name, text, list(self.labels), buckets=BUCKETS, registry=self.registry)
        return family.labels(*self.labels.values())


class _ProgressCollector(Collector):
    """Reads Progress and Gauges at scrape time."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not read values that are not there yet."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        progress, gauges = self._metrics.progress, self._metrics.gauges
        for attribute, name, text in _COUNTERS:
            yield self._counter(name, text, getattr(progress, attribute))
        yield self._counter(
            "relay_reconnects",
            "Connections lost and made again.",
            {"source": progress.source_reconnects, "sink": progress.sink_reconnects},
            "side",
        )
        yield from self._now(progress)
        for attribute, name, text in _GAUGES:
            value = getattr(gauges, attribute)
            if value is not None:
                yield self._gauge(name, text, value)
        if gauges.slot_wal_status is not None:
            statuses = {s: s == gauges.slot_wal_status for s in WAL_STATUSES}
            yield self._gauge("relay_slot_wal_status", "1 for the slot's wal_status.", statuses, "wal_status")

    def _now(self, progress: Progress) -> Iterator[Metric]:
        gauge, now = self._gauge, time.monotonic()
        yield gauge("relay_build_info", "Version of the relay.", {__version__: 1}, "version")
        yield gauge("relay_state", "1 for the current state.", {s: s == progress.state for s in STATES}, "state")
        ready = not progress.stalled(self._metrics.stalled_after, now)
        yield gauge("relay_ready", "1 if events are moving or there are none, as /readyz says.", ready)
        yield gauge("relay_epoch", "How often a relay of this name became the active one.", progress.epoch)
        yield gauge("relay_in_flight_events", "Events received but not acknowledged.", progress.in_flight_events)
        yield gauge("relay_in_flight_bytes", "Bytes received but not acknowledged.", progress.in_flight_bytes)
        yield gauge(
            "relay_lag_bytes",
            "WAL between the end of the server's and each stage.",
            lag_bytes(progress),
            "stage",
        )
        yield gauge(
            "relay_lag_seconds",
            "Age of the oldest event that is not acknowledged; 0 if there is none.",
            lag_seconds(progress, self._metrics.gauges, time.time()),
        )
        positions = {stage: int(getattr(progress, f"{stage}_lsn")) for stage in STAGES}
        yield gauge("relay_lsn_bytes", "LSN of each stage, as a number.", positions, "stage")
        yield gauge(
            "relay_source_silence_seconds",
            "Since Postgres last sent anything.",
            max(0.0, now - progress.last_heard),
        )

    def _counter(self, name: str, text: str, values: _Values, label: str = "") -> Metric:
        return self._filled(CounterMetricFamily(name, text, labels=self._names(label)), values)

    def _gauge(self, name: str, text: str, values: _Values, label: str = "") -> Metric:
        return self._filled(GaugeMetricFamily(name, text, labels=self._names(label)), values)

    def _names(self, label: str) -> list[str]:
        return [*self._metrics.labels, label] if label else list(self._metrics.labels)

    def _filled(self, metric: CounterMetricFamily | GaugeMetricFamily, values: _Values) -> Metric:
        constant = list(self._metrics.labels.values())
        if isinstance(values, Mapping):
            for label, value in values.items():
                metric.add_metric([*constant, label], float(value))
        else:
            metric.add_metric(constant, float(values))
        return metric


_Values = float | Mapping[str, float]  # one value, or one per value of the label


def lag_bytes(progress: Progress) -> dict[str, int]:
    """WAL between the server's end and each of our three stages; a stage that has no LSN yet is left out."""
    lag: dict[str, int] = {}
    for stage in STAGES[:3]:
        lsn: LSN = getattr(progress, f"{stage}_lsn")
        if lsn and progress.server_lsn:
            lag[stage] = max(0, progress.server_lsn - lsn)  # the sample of the end may be older than what came since
    return lag


def lag_seconds(progress: Progress, gauges: Gauges, now: float) -> float:
    """Age of the oldest event that is not acknowledged (`now` is Unix time); 0 if there is none.

    While events move it is the oldest received one. While they do not, those that wait in Postgres count too; they are
    left out otherwise, because the query sees what no checkpoint covers yet, acknowledged or not.
    """
    lag = 0.0 if progress.oldest_commit_at is None else max(0.0, now - progress.oldest_commit_at)
    if progress.state not in ("streaming", "polling", "recovering"):
        lag = max(lag, gauges.oldest_pending_age_seconds or 0.0)
    return lag
