"""Rounds that the hypervisor disturbed are measured again: what decides, what is kept, what is never lost sight of."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from relay.bench.calm import TRIES, Rounds, calmest
from relay.bench.meter import Stolen
from relay.bench.plan import make_plan
from relay.bench.result import Measurement
from relay.bench.runner import run
from relay.errors import ConfigError


def _measurement(stolen: float | None, stored: int = 9) -> Measurement:
    return Measurement("steady", "jetstream", "relay", "m", 0, 0, rows=9, stored=stored, stolen_share=stolen)


def _rounds(shares: Sequence[Sequence[float | None]], most: float | None) -> tuple[Rounds, list[str]]:
    """What comes of rounds in which so much was stolen, and what was said meanwhile."""
    coming = iter(shares)
    said: list[str] = []

    async def measure() -> list[Measurement]:
        return [_measurement(share) for share in next(coming)]

    return asyncio.run(calmest(measure, most, said.append)), said


@pytest.mark.parametrize(
    ("shares", "most", "kept", "aside"),
    [
        ([[0.3]], None, [0.3], []),  # nobody asked
        ([[0.01]], 0.02, [0.01], []),
        ([[0.02]], 0.02, [0.02], []),
        ([[0.3], [0.1], [0.0]], 0.02, [0.0], [0.1, 0.3]),
        ([[0.0, 0.3], [0.01, 0.02]], 0.02, [0.01, 0.02], [0.0, 0.3]),  # the whole round, or its ratios say nothing
        ([[None]], 0.02, [None], []),  # a machine that does not tell
        ([[0.3], *[[0.2]] * 4, [0.1], *[[0.2]] * (TRIES - 6)], 0.02, [0.1], [*[0.2] * (TRIES - 2), 0.3]),
    ],
)
def test_the_first_calm_round_is_kept_and_the_others_are_put_aside(
    shares: list[list[float | None]], most: float | None, kept: list[float | None], aside: list[float]
) -> None:
    rounds, said = _rounds(shares, most)
    assert [each.stolen_share for each in rounds.kept] == kept
    assert [each.stolen_share for each in rounds.aside] == aside
    assert len(said) == len(shares) - 1


def test_percent_on_the_command_line_is_a_share_in_the_plan() -> None:
    assert make_plan(["idle"], calm=2).calm == 0.02
    assert make_plan(["idle"]).calm is None
    with pytest.raises(ConfigError, match="--calm must be more than 0"):
        make_plan(["idle"], calm=0)


def test_a_disturbed_round_is_measured_again_on_the_same_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real servers; only what the hypervisor takes is ours to say."""
    shares = iter([0.3, 0.01])
    monkeypatch.setattr(Stolen, "share", lambda _: next(shares))
    said: list[str] = []
    plan = make_plan(["idle"], seconds=1, quick=True, modes=["stream-pgoutput"], calm=2)
    report = asyncio.run(run(plan, lambda _, text: said.append(text)))
    assert [each.stolen_share for each in report.measurements] == [0.01]
    assert [each.stolen_share for each in report.set_aside] == [0.3]
    assert report.summaries[0].repetitions == 1
    assert "30.0% of the CPU was stolen, measuring again" in " ".join(said)
    assert report.correct
