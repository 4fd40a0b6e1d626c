"""Presets: the outbox tables that people have, as values of an `[[outbox]]` block. What the block itself says wins.

Each is the table's DDL as it stands: `seq` and `xid` are used where `relay setup --adopt` has added them.
"""

from __future__ import annotations

from typing import Any

_NO_EXTRAS = {"topic": "", "partition_key": "", "headers": ""}

PRESETS: dict[str, dict[str, Any]] = {
    # status pending | published | failed, retry_count, next_retry_at; a user and a project on every row
    "event_outbox": {
        "table": "public.event_outbox",
        "columns": _NO_EXTRAS,
        "header_columns": {"user-id": "user_id", "project-id": "project_id"},
        "unpublished": {"status": "pending"},
        "write_back": {"status": "published", "published_at": "now()"},
        "claim": {"attempts": "retry_count", "next_attempt": "next_retry_at", "failed": {"status": "failed"}},
    },
    # status pending | sent | failed, attempt_cnt
    "outbox": {
        "table": "public.outbox",
        "columns": _NO_EXTRAS,
        "unpublished": {"status": "pending"},
        "write_back": {"status": "sent", "updated_at": "now()"},
        "claim": {
            "attempts": "attempt_cnt",
            "next_attempt": "",
            "last_error": "",
            "failed": {"status": "failed", "updated_at": "now()"},
        },
    },
    # names its JetStream stream and topic itself; no key: order is per stream
    "stream_outbox": {
        "table": "public.outbox_events",
        "columns": {
            "aggregate_type": "",
            "aggregate_id": "",
            "event_type": "topic",
            "topic": "topic",
            "partition_key": "",
            "headers": "",
            "stream": "stream",
        },
        "routing": {"key": "{stream}"},
        "unpublished": {"processed": "false", "error": "NULL"},
        "write_back": {"processed": "true", "processed_at": "now()"},
        "claim": {"attempts": "", "next_attempt": "", "last_error": "", "failed": {"error": "{error}"}},
    },
    # published_at, retry_count, next_retry_at; one schema per service
    "service_outbox": {
        "table": "public.outbox_events",
        "columns": _NO_EXTRAS,
        "unpublished": {"published_at": "NULL"},
        "write_back": {"published_at": "now()", "updated_at": "now()"},
        "claim": {"attempts": "retry_count", "next_attempt": "next_retry_at", "last_error": ""},
    },
    # Debezium's outbox event router, with its documented defaults
    "debezium": {
        "table": "public.outboxevent",
        "columns": {
            "aggregate_type": "aggregatetype",
            "aggregate_id": "aggregateid",
            "event_type": "type",
            "created_at": "",
            **_NO_EXTRAS,
        },
        "routing": {
            "topic": "outbox.event.{aggregate_type}",
            "key": "{aggregate_id}",
            "format": "payload",
            "headers": ["id"],
        },
    },
}


def applied(block: dict[str, Any]) -> dict[str, Any]:
    """An `[[outbox]]` block with its preset's values below its own."""
    preset = PRESETS.get(str(block.get("preset")))
    if preset is None:
        return block
    merged = {**preset, **block}
    for part in ("columns", "routing", "claim"):
        if isinstance(block.get(part), dict) and part in preset:
            merged[part] = {**preset[part], **block[part]}
    return merged
