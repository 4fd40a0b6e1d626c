"""Metrics have the names and units that docs/metrics.md promises, and the old names live on."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.core import Metric

from relay.admin import progress_line
from relay.admin.exposition import registry
from relay.errors import SinkUnavailable
from relay.lsn import LSN
from relay.metrics import BUCKETS, STATES, Gauges, Metrics, lag_bytes, lag_seconds
from relay.progress import Progress

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")

# What users' dashboards and scripts use today.
OLD_NAMES = {
    "outbox_pending_count",
    "outbox_oldest_pending_age_seconds",
    "outbox_publish_success_total",
    "outbox_publish_failed_total",
    "outbox_publish_latency_ms",
    "outbox_pending_records",
    "outbox_publish_attempts_total{result}",
    "outbox_dlq_total",
    "outbox.pending_count",
    "outbox.failed_count",
    "outbox.published_total",
    "outbox.publish_latency_ms",
    "totals",
    "unprocessed count",
    "processing rate",
    "worker lag",
    "broker latency",
    "error rate",
    "outbox_publish_attempts_total",
    "outbox_published_total",
    "outbox_retry_total",
    "outbox_failed_permanent_total",
    "outbox_backlog_gauge",
    "outbox_publish_latency_seconds",
}
OLD_EVENTS = {"outbox_enqueued", "outbox_publish_succeeded", "outbox_publish_failed", "outbox_dead_lettered"}


def full() -> Metrics:
    """Metrics in which everything is known."""
    progress = Progress(
        state="streaming", received_lsn=LSN(300), acknowledged_lsn=LSN(200), confirmed_lsn=LSN(100), server_lsn=LSN(400)
    )
    metrics = Metrics(progress, relay_name="shop_relay", service="shop")
    metrics.gauges = Gauges(
        pending_events=3,
        oldest_pending_age_seconds=1.5,
        average_pending_age_seconds=0.5,
        dead_letters=1,
        parked_events=2,
        slot_name="outbox_relay",
        slot_active=True,
        slot_wal_status="extended",
        slot_retained_bytes=1024,
        slot_safe_wal_bytes=2048,
        anchor_retained_bytes=512,
    )
    metrics.observe(0.004, 0.002)
    metrics.failed(SinkUnavailable("down"))
    return metrics


def ours(metrics: Metrics) -> dict[str, Metric]:
    return {family.name: family for family in registry(metrics).collect() if family.name.startswith("relay_")}


def exported(metrics: Metrics) -> set[str]:
    """Names as a query writes them: a histogram by its base name too."""
    names = {sample.name for family in ours(metrics).values() for sample in family.samples}
    return names | {name.removesuffix("_bucket") for name in names if name.endswith("_bucket")}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return registry(metrics).get_sample_value(name, {"relay": "shop_relay", "service": "shop", **labels})


def table_after(marker: str) -> list[list[str]]:
    lines = DOC.partition(marker)[2].lstrip("\n").splitlines()
    rows: list[list[str]] = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def rules(name: str) -> list[dict[str, Any]]:
    document = yaml.safe_load((ROOT / "deploy" / "prometheus" / name).read_text(encoding="utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def test_every_series_has_the_prefix_the_labels_and_a_base_unit() -> None:
    for family in registry(full()).collect():
        if family.name.startswith(("process_", "python_")):
            continue
        assert family.name.startswith("relay_")
        assert family.documentation.endswith(".")
        assert not re.search(r"_(ms|millis|minutes|kb|mb|count)$", family.name)
        for sample in family.samples:
            assert sample.labels["relay"] == "shop_relay"
            assert sample.labels["service"] == "shop"
            if family.type == "counter":
                assert sample.name.endswith(("_total", "_created"))


def test_the_service_is_the_relay_unless_told() -> None:
    metrics = Metrics(Progress(), relay_name="shop_relay")
    assert metrics.labels == {"relay": "shop_relay", "service": "shop_relay"}


def test_two_relays_in_one_process_do_not_meet() -> None:
    one, other = full(), Metrics(Progress(), relay_name="shop_relay", service="shop")
    one.progress.published_events = 5
    assert value(one, "relay_events_published_total") == 5
    assert value(other, "relay_events_published_total") == 0


def test_values_are_read_when_scraped() -> None:
    metrics = full()
    metrics.progress.received_events = 10
    metrics.progress.sink_reconnects = 2
    assert value(metrics, "relay_events_received_total") == 10
    assert value(metrics, "relay_reconnects_total", side="sink") == 2
    assert value(metrics, "relay_reconnects_total", side="source") == 0


def test_the_counters_of_progress_are_all_exported() -> None:
    metrics = full()
    counters = [field.name for field in fields(Progress) if field.name.endswith(("s", "bytes")) and field.type == "int"]
    counters = [name for name in counters if not name.startswith("in_flight")]
    for number, name in enumerate(counters, start=1000):
        setattr(metrics.progress, name, number)
    samples = {sample.value for family in ours(metrics).values() for sample in family.samples}
    assert len(counters) >= 14
    assert {float(number) for number, _ in enumerate(counters, start=1000)} <= samples


def test_exactly_one_state_is_1() -> None:
    metrics = full()
    for state in STATES:
        metrics.progress.state = state  # type: ignore[assignment]
        assert {s for s in STATES if value(metrics, "relay_state", state=s)} == {state}


def test_the_slot_shows_its_wal_status() -> None:
    metrics = full()
    assert value(metrics, "relay_slot_wal_status", wal_status="extended") == 1
    assert value(metrics, "relay_slot_wal_status", wal_status="lost") == 0
    assert value(metrics, "relay_slot_active") == 1


@pytest.mark.guarantee("G10")
def test_ready_is_what_readyz_says() -> None:
    metrics = full()
    assert value(metrics, "relay_ready") == 1
    metrics.progress.state = "parked"
    assert value(metrics, "relay_ready") == 0


def test_what_is_not_known_is_not_exported() -> None:
    names = exported(Metrics(Progress(), relay_name="shop_relay"))
    assert "relay_pending_events" not in names
    assert "relay_slot_retained_bytes" not in names
    assert "relay_slot_wal_status" not in names
    assert "relay_lag_bytes" not in names
    assert "relay_events_published_total" in names


def test_lag_is_told_per_stage_and_never_negative() -> None:
    metrics = full()
    assert lag_bytes(metrics.progress) == {"received": 100, "acknowledged": 200, "confirmed": 300}
    metrics.progress.received_lsn = LSN(500)  # came after the sample of the server's end
    assert lag_bytes(metrics.progress)["received"] == 0


def test_lag_in_seconds_counts_what_waits_in_postgres_only_while_nothing_moves() -> None:
    progress, gauges = Progress(state="streaming"), Gauges(oldest_pending_age_seconds=50.0)
    assert lag_seconds(progress, gauges, 1000.0) == 0.0
    progress.oldest_commit_at = 993.0
    assert lag_seconds(progress, gauges, 1000.0) == 7.0
    assert lag_seconds(progress, gauges, 990.0) == 0.0  # the server's clock is ahead of ours
    progress.state = "parked"
    assert lag_seconds(progress, gauges, 1000.0) == 50.0


def test_latencies_are_resolved_from_half_a_millisecond_to_a_minute() -> None:
    metrics = full()
    assert (BUCKETS[0], BUCKETS[-1]) == (0.0005, 60)
    assert list(BUCKETS) == sorted(set(BUCKETS))
    assert {5, 30} <= set(BUCKETS)  # thresholds of alerts must be bounds, or the quantile is a guess
    assert value(metrics, "relay_delivery_seconds_bucket", le="0.005") == 1
    assert value(metrics, "relay_delivery_seconds_bucket", le="0.003") == 0
    assert value(metrics, "relay_publish_seconds_bucket", le="0.002") == 1


def test_an_unknown_commit_time_and_a_clock_that_is_ahead_do_no_harm() -> None:
    metrics = full()
    metrics.observe(None, 0.001)
    metrics.observe(-3.0, 0.001)
    assert value(metrics, "relay_delivery_seconds_count") == 2
    assert value(metrics, "relay_delivery_seconds_sum") == pytest.approx(0.004)
    assert value(metrics, "relay_publish_seconds_count") == 3


@given(st.lists(st.sampled_from(BUCKETS) | st.floats(0, 1e6), max_size=50))
def test_histograms_count_as_prometheus_own_do(values: list[float]) -> None:
    reference = prometheus_client.Histogram("relay_publish_seconds", "…", buckets=BUCKETS, registry=None)
    metrics = Metrics(Progress(), relay_name="shop_relay", service="shop")
    for each in values:
        reference.observe(each)
        metrics.observe(None, each)
    (family,) = reference.collect()
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            assert value(metrics, sample.name, **sample.labels) == sample.value


def test_errors_are_counted_by_class() -> None:
    assert value(full(), "relay_errors_total", error="SinkUnavailable") == 1


def test_the_page_can_be_made() -> None:
    assert b"relay_build_info" in generate_latest(registry(full()))


def test_every_metric_is_documented_and_every_documented_one_exists() -> None:
    documented = set(re.findall(r"`(relay_[a-z_]+)(?:\{[a-z_]+\})?`", DOC))
    names = exported(full())
    described = {name for name in names if not name.endswith(("_bucket", "_sum", "_count", "_created"))}
    assert described <= documented, "exported, but not documented"
    assert documented <= names, "documented, but not exported"


def test_every_old_name_has_a_counterpart_that_is_exported() -> None:
    rows = table_after("<!-- counterparts: a test reads this table -->")[2:]
    counterparts = {row[0].strip("`"): row[1].strip("`") for row in rows}
    assert set(counterparts) == OLD_NAMES
    assert set(counterparts.values()) <= exported(full())
    for _, _, query in rows:
        assert set(re.findall(r"relay_\w+", query)) <= exported(full())


def test_every_old_log_event_has_a_counterpart() -> None:
    rows = {row[0].strip("`"): row[1] for row in table_after("| old event | ours |\n|---|---|")}
    assert set(rows) == OLD_EVENTS
    for text in rows.values():
        assert set(re.findall(r"relay_\w+", text)) <= exported(full())
    assert {"received_events", "published_events"} <= set(progress_line(full(), clock=0.0))


def test_the_documented_progress_line_is_the_real_one() -> None:
    documented = set(re.findall(r"`(\w+)`", DOC.rpartition("`relay.progress` has")[2]))
    assert documented == set(progress_line(full(), clock=0.0))


def test_recording_rules_keep_every_old_name_alive() -> None:
    recorded = {rule["record"] for rule in rules("recording-rules.yml")}
    for name in OLD_NAMES:
        plain = name.partition("{")[0].replace(".", "_")
        if " " in plain or "_" not in plain:
            continue  # described, never named
        assert plain in recorded or f"{plain}_bucket" in recorded, name
    assert all(re.fullmatch(r"[a-z_:]+", name) for name in recorded)


@pytest.mark.parametrize("name", ["recording-rules.yml", "alerts.yml"])
def test_rules_ask_only_for_what_is_exported(name: str) -> None:
    names = exported(full())
    for rule in rules(name):
        asked = set(re.findall(r"relay_\w+", rule["expr"]))
        assert asked <= names, rule
        assert asked
        assert rule["expr"].count("(") == rule["expr"].count(")")


def test_recorded_series_differ() -> None:
    keys = [(rule["record"], tuple(sorted(rule.get("labels", {}).items()))) for rule in rules("recording-rules.yml")]
    assert len(keys) == len(set(keys))
    for rule in rules("recording-rules.yml"):
        assert "by (service" in rule["expr"]


def test_every_alert_says_what_and_where_to_read_on() -> None:
    alerts = rules("alerts.yml")
    assert len({alert["alert"] for alert in alerts}) == len(alerts)
    for alert in alerts:
        assert alert["alert"].startswith("Relay")
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"]["summary"]
        assert re.fullmatch(r"docs/operations\.md#[a-z-]+", alert["annotations"]["runbook"])


def test_every_alert_points_to_a_heading_of_the_runbook() -> None:
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    anchors = {heading.strip().lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE)}
    asked = {alert["annotations"]["runbook"].partition("#")[2] for alert in rules("alerts.yml")}
    assert asked - anchors == set()
