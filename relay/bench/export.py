"""The measurements as CSV: one line per figure, so that a spreadsheet or a data frame can turn it as it likes."""

from __future__ import annotations

import csv
import io

from relay.bench.result import Report, figures

_COLUMNS = ("scenario", "sink", "tool", "mode", "repetition", "correct", "figure", "value")


def to_csv(report: Report) -> str:
    """Every single measurement, not the medians; the points of the latency curve are left to the JSON."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for each in report.measurements:
        key = (each.scenario, each.sink, each.tool, each.mode, each.repetition, str(each.correct).lower())
        for name, value in figures(each).items():
            if value is not None and not name.startswith("curve."):
                writer.writerow((*key, name, value))
    return out.getvalue()
