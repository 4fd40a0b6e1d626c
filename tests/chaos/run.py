"""`python -m tests.chaos.run`: one run of the chaos verifier, with a report. Exit code 1 when a promise was broken."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
import sys
from pathlib import Path

from tests.chaos.harness.run import run
from tests.chaos.harness.schedule import MODES, PROFILES, Options


def options(arguments: list[str]) -> Options:
    plain = Options()
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="repeats a schedule; without it a new one is drawn")
    parser.add_argument("--minutes", type=float, default=plain.minutes)
    parser.add_argument("--broker", choices=list(MODES), default=plain.broker)
    parser.add_argument("--mode", choices=[mode for modes in MODES.values() for mode in modes], default=None)
    parser.add_argument("--postgres", choices=["15", "16", "18"], default=plain.postgres)
    parser.add_argument("--plugin", choices=["pgoutput", "wal2json"], default=plain.plugin)
    parser.add_argument("--source", choices=["stream", "poll", "auto"], default=plain.source)
    parser.add_argument("--faults", type=int, default=None, help="how many, spread over the time (20 a minute)")
    parser.add_argument("--events", type=int, default=None, help="how many in total (500 a second)")
    parser.add_argument("--profile", default=plain.profile, help=f"{', '.join(PROFILES)}, or kinds with commas between")
    parser.add_argument("--relays", type=int, default=plain.relays, help="1: started again; 2: and a stand-by")
    parser.add_argument("--writers", type=int, default=plain.writers)
    parser.add_argument("--keys", type=int, default=plain.keys)
    parser.add_argument("--overlap", type=int, default=plain.overlap, help="how many faults at the same time")
    parser.add_argument("--backlog", type=int, default=plain.backlog, help="the writers wait while more is pending")
    parser.add_argument("--settle", type=float, default=plain.settle, help="seconds for the rest to arrive")
    parser.add_argument("--report", type=Path, default=plain.report, metavar="DIR")
    given = vars(parser.parse_args(arguments))
    given["seed"] = random.randrange(1, 100_000) if given["seed"] is None else given["seed"]
    given["mode"] = given["mode"] or MODES[given["broker"]][0]
    given["faults"] = round(given["minutes"] * 20) if given["faults"] is None else given["faults"]
    given["events"] = round(given["minutes"] * 30_000) if given["events"] is None else given["events"]
    chosen = dataclasses.replace(plain, **given)
    if fault := chosen.faulty():
        parser.error(fault)
    return chosen


def main() -> int:
    chosen = options(sys.argv[1:])
    report = asyncio.run(run(chosen, lambda text: print(text, flush=True)))
    report.write(chosen.report)
    print(f"\n{report.text()}\nreport: {chosen.report / 'report.html'}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
