"""Presets: what the block says wins, and each preset is a valid block."""

from __future__ import annotations

import pytest

from relay.adopt import condition
from relay.config import Outbox
from relay.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_valid_block(name: str) -> None:
    outbox = Outbox.model_validate({"preset": name})
    assert outbox.table == PRESETS[name]["table"]
    assert not {"seq", "xid"} & outbox.columns.model_fields_set  # used where the table was adopted


def test_what_the_block_says_wins() -> None:
    block = {
        "preset": "debezium",
        "table": "sales.outbox",
        "columns": {"aggregate_type": "kind"},
        "routing": {"topic": "sales"},
        "write_back": {"sent": True},
    }
    outbox = Outbox.model_validate(block)
    assert (outbox.table, outbox.columns.aggregate_type, outbox.columns.aggregate_id) == (
        "sales.outbox",
        "kind",
        "aggregateid",
    )
    assert outbox.routing is not None
    assert (outbox.routing.topic, outbox.routing.format) == ("sales", "payload")
    assert outbox.write_back == {"sent": True}
    assert Outbox.model_validate({"preset": "outbox", "write_back": {}}).write_back == {}


def test_conditions_are_quoted() -> None:
    text = condition({"status": "it's", "Sent": "NULL", "done": False}).as_string(None)
    assert text == """"status" = 'it''s' AND "Sent" IS NULL AND "done" = false"""
