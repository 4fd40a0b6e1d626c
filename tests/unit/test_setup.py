"""The psql variables of sql/, as `relay setup` fills them in; and the judgement of slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from relay.adopt import Step
from relay.errors import RelayError, SetupError, SlotBusy, SlotLost
from relay.lsn import LSN
from relay.setup import script
from relay.setup_plan import VERSION
from relay.setup_sql import fill, load
from relay.source.slot import SlotInfo, slot_fault
from relay.status import state_of

GOOD = SlotInfo("s", plugin="pgoutput", database="shop", wal_status="reserved", confirmed_flush_lsn=LSN(100))


def test_variables_are_quoted_as_they_are_written() -> None:
    text = fill("""x :"a".:'b' = :c; y::text; 'z':d; $$:e$$""", {"a": 'we"ird', "b": "it's"}, {"c": "now()"})
    assert text == """x "we""ird".'it''s' = now(); y::text; 'z':d; $$:e$$"""


def test_an_unknown_quoted_variable_is_a_bug() -> None:
    with pytest.raises(KeyError):
        fill('SELECT :"nobody"', {}, {})


def test_what_psql_needs_is_left_out() -> None:
    text = load("003_uuidv7.sql", {"schema": "public"})
    assert "\\if" not in text
    assert 'CREATE OR REPLACE FUNCTION "public".outbox_uuidv7()' in text


def test_the_version_is_that_of_the_newest_file() -> None:
    folder = Path(__file__).parents[2] / "sql"
    assert max(int(file.name[:3]) for file in folder.glob("[0-9]*.sql")) == VERSION


def test_the_script_is_one_transaction() -> None:
    steps = [Step("table t", "created", "CREATE TABLE t ();"), Step("role r", "present", note="no password")]
    assert script(steps) == "-- note: role r: no password\nBEGIN;\n\n-- table t\nCREATE TABLE t ();\n\nCOMMIT;\n"
    assert script(steps[1:]) == "-- note: role r: no password\n-- nothing to do\n"


@pytest.mark.parametrize(
    ("slot", "error", "says"),
    [
        (None, SlotLost, "does not exist"),
        (replace(GOOD, wal_status="lost"), SlotLost, "invalidated"),
        (replace(GOOD, invalidation_reason="idle_timeout"), SlotLost, "idle_timeout"),
        (replace(GOOD, confirmed_flush_lsn=LSN(201)), SlotLost, "moved"),
        (replace(GOOD, confirmed_flush_lsn=None), SlotLost, "never finished"),
        (replace(GOOD, plugin="wal2json"), SetupError, "wal2json"),
        (replace(GOOD, database="other"), SetupError, "other"),
        (replace(GOOD, slot_type="physical", plugin=None, database=None), SetupError, "physical"),
        (replace(GOOD, two_phase=True), SetupError, "two_phase"),
        (replace(GOOD, active=True, active_pid=7), SlotBusy, "process 7"),
        # In use, it moves on with its owner's checkpoint, of which we know an old state.
        (replace(GOOD, active=True, confirmed_flush_lsn=LSN(201)), SlotBusy, "in use"),
    ],
)
def test_a_slot_that_cannot_be_streamed(slot: SlotInfo | None, error: type[RelayError], says: str) -> None:
    fault = slot_fault(slot, plugin="pgoutput", database="shop", checkpoint_lsn=LSN(200))
    assert isinstance(fault, error)
    assert says in str(fault)
    assert fault.hint


@pytest.mark.parametrize("checkpoint", [None, LSN(100), LSN(200)])
def test_a_good_slot(checkpoint: LSN | None) -> None:
    assert slot_fault(GOOD, plugin="pgoutput", database="shop", checkpoint_lsn=checkpoint) is None


@pytest.mark.parametrize(
    ("locked", "active", "phase", "state"),
    [
        (False, False, None, "stopped"),
        (False, False, "stream", "stopped"),
        (False, True, "stream", "standby"),
        (True, True, "stream", "streaming"),
        (True, False, "stream", "recovering"),
        (True, False, "recover", "recovering"),
        (True, False, "poll", "polling"),
        (True, False, None, "recovering"),
    ],
)
def test_state(locked: bool, active: bool, phase: str | None, state: str) -> None:
    assert state_of(locked=locked, slot_active=active, phase=phase) == state
