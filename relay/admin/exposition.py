"""Every metric of the relay under its public name: prefix `relay_`, base units, labels from small closed sets only.

A scrape reads what `Metrics` holds; nothing is kept here. Nothing is global: each registry is one relay's.
docs/metrics.md explains every name.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from relay import __version__
from relay.metrics import BUCKETS, STAGES, STATES, WAL_STATUSES, Histogram, Metrics, lag_bytes, lag_seconds
from relay.progress import Progress

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


def registry(metrics: Metrics) -> CollectorRegistry:
    """What a scraper of this relay gets. Every `relay_` series carries the labels `relay` and `service`."""
    made = CollectorRegistry()
    made.register(_Collector(metrics))
    ProcessCollector(registry=made)
    PlatformCollector(registry=made)
    return made


class _Collector(Collector):
    """Reads what the relay counted, at scrape time."""

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
        yield self._counter("relay_errors", "Errors by class (docs/operations.md).", self._metrics.errors, "error")
        yield self._histogram(
            "relay_delivery_seconds",
            "From commit in Postgres to the sink's acknowledgement; a batch's oldest event.",
            self._metrics.delivery,
        )
        yield self._histogram(
            "relay_publish_seconds",
            "From handing a batch to the sink to its acknowledgement.",
            self._metrics.publish,
        )

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

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, text, labels=self._names(""))
        bounds = [*(str(float(bound)) for bound in BUCKETS), "+Inf"]
        counts = accumulate(histogram.counts)
        family.add_metric(list(self._metrics.labels.values()), list(zip(bounds, counts, strict=True)), histogram.total)
        return family

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
