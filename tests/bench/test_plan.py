"""What the command line asks for, who takes part, and what is set against what."""

from __future__ import annotations

from dataclasses import replace

import pytest

from relay.bench.contest import compared, contenders, groups
from relay.bench.modes import parse_mode
from relay.bench.plan import make_plan
from relay.bench.result import Cpu, Latency, Measurement
from relay.bench.tools import toml
from relay.config import Config
from relay.errors import ConfigError


def _measured(tool: str, mode: str, speed: float, **more: object) -> Measurement:
    each = Measurement("backlog", "jetstream", tool, mode, 0, 0, rows=9, stored=9, events_per_second=speed)
    return replace(each, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("stream-pgoutput", {"source": {"mode": "stream", "plugin": "pgoutput"}}),
        ("stream-wal2json", {"source": {"mode": "stream", "plugin": "wal2json"}}),
        ("poll-snapshot", {"source": {"mode": "poll", "plugin": "pgoutput"}}),
        ("poll-snapshot@100ms", {"source": {"mode": "poll", "plugin": "pgoutput"}, "poll": {"interval": 0.1}}),
        (
            "poll-claim-4@2s",
            {
                "source": {"mode": "poll", "plugin": "pgoutput"},
                "poll": {"strategy": "claim", "workers": 4, "min_interval": 2.0, "max_interval": 2.0},
            },
        ),
        (
            "stream-pgoutput+writeback",
            {
                "source": {"mode": "stream", "plugin": "pgoutput"},
                "outbox": [{"write_back": {"published_at": "now()"}}],
            },
        ),
    ],
)
def test_a_mode_is_a_piece_of_configuration(text: str, config: dict[str, object]) -> None:
    mode = parse_mode(text)
    assert mode.config == config
    Config.model_validate({"database": {"dsn": "dbname=x"}, **mode.config})
    assert mode.marks == ("claim" in text or "writeback" in text)
    assert mode.streams == text.startswith("stream")


@pytest.mark.parametrize(
    "text",
    ["stream", "stream-x", "stream-pgoutput@1s", "poll-claim-0", "poll-claim@0ms", "poll-claim+writeback", "poll@1"],
)
def test_what_is_no_mode_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--mode"):
        parse_mode(text)


def test_every_fault_of_the_command_line_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(
            ["backlog", "nonsense"],
            sinks=["carrier-pigeon"],
            modes=["walk"],
            peers=["unheard-of"],
            baseline="nobody",
            rows=0,
            quick=True,
            full=True,
        )
    assert len(caught.value.faults) == 7


def test_a_size_changes_only_the_scenarios_that_have_it() -> None:
    plan = make_plan(["backlog", "steady", "idle", "big-transaction"], rows=7, quick=True)
    by_name = {scenario.name: scenario for scenario in plan.scenarios}
    assert by_name["backlog"].rows == by_name["big-transaction"].rows == 7
    assert by_name["steady"].rows == by_name["idle"].rows == 0
    assert by_name["steady"].seconds == 8.0


def test_presets_choose_what_was_not_chosen() -> None:
    full = make_plan(full=True)
    assert full.repeat == 3
    assert full.kinds == ("jetstream", "kafka")
    assert len(full.scenarios) == 10
    assert make_plan(full=True, modes=["stream-pgoutput"], repeat=1).repeat == 1
    assert [mode.name for mode in make_plan(quick=True).modes] == ["stream-pgoutput", "poll-claim@100ms"]
    assert make_plan(modes=["stream-wal2json"]).postgres == "15"


def test_who_only_reads_shares_the_rows_and_who_begins_alternates() -> None:
    plan = make_plan(["backlog"], modes=["stream-pgoutput", "poll-claim", "poll-snapshot"], peers=(), repeat=2)
    scenario = plan.scenarios[0]
    found = contenders(plan, scenario, "jetstream", {})
    first, second = groups(found, scenario, 0), groups(found, scenario, 1)
    shared = ["relay stream-pgoutput, jetstream", "relay poll-snapshot, jetstream", "pg_recvlogical pgoutput"]
    assert [[each.label for each in group] for group in first] == [shared, ["relay poll-claim, jetstream"]]
    assert [each.label for each in second[0]] == ["relay poll-claim, jetstream"]
    assert [each.label for each in second[1]] == [shared[1], shared[2], shared[0]]
    steady = make_plan(["steady"], modes=["stream-pgoutput", "poll-snapshot"])
    assert len(groups(contenders(steady, steady.scenarios[0], "jetstream", {}), steady.scenarios[0], 0)) == 3


def test_ratios_to_the_limit_of_the_same_plugin_and_to_the_baseline() -> None:
    plan = make_plan(["backlog"], modes=["stream-pgoutput", "stream-wal2json", "poll-claim"], baseline="poll-claim")
    late = Latency(1, 10.0, 20.0, 40.0, 50.0)
    found = compared(
        plan,
        [
            _measured("relay", "stream-pgoutput", 80.0, cpu_us_per_event=Cpu(9.0, None, None, None)),
            _measured("relay", "stream-wal2json", 40.0, latency=replace(late, p50_ms=1.0)),
            _measured("relay", "poll-claim", 20.0, latency=late, cpu_us_per_event=Cpu(18.0, None, None, None)),
            _measured("pg_recvlogical", "stream-pgoutput", 100.0),
            _measured("pg_recvlogical", "stream-wal2json", 80.0),
        ],
    )
    assert [each.ratio_to_limit for each in found] == [0.8, 0.5, 0.2, 1.0, 1.0]
    assert found[0].against_baseline == {"events_per_second": 4.0, "cpu_us_per_event": 0.5}
    assert found[1].against_baseline == {"events_per_second": 2.0, "p50_ms": 0.1, "p99_ms": 1.0}


def test_what_the_tool_is_given_is_toml() -> None:
    tree = {"sink": {"kind": "kafka", "kafka": {"options": {"bootstrap.servers": "a:1"}}}, "outbox": [{"table": "t"}]}
    import tomllib

    assert tomllib.loads(toml(tree)) == tree
