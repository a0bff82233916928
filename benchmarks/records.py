"""What every benchmark here takes and gives: `python -m benchmarks.NAME [--quick] [--json FILE]`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

__all__ = ["Options", "Record", "options", "percentile", "publish", "ratio"]


class Record(msgspec.Struct, frozen=True):
    """One measured value. The metric's name says what the baseline is; both are None where there is none."""

    metric: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None


class Options(msgspec.Struct, frozen=True):
    quick: bool
    json: Path | None


def options(description: str | None) -> Options:
    """The command line that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats: a look, not a result")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    given = parser.parse_args()
    return Options(given.quick, given.json)


def ratio(metric: str, value: float, baseline: float, unit: str) -> Record:
    """A record of `value` beside a baseline measured in the same run."""
    return Record(metric, value, unit, baseline, value / baseline if baseline else None)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def publish(records: Sequence[Record], file: Path | None) -> None:
    """Print the records, and write them where `--json` says."""
    for record in records:
        beside = "" if record.baseline is None else f"   beside {record.baseline:.4g}"
        times = "" if record.ratio is None else f"   ratio {record.ratio:.3f}"
        print(f"{record.metric:<56} {record.value:>12.4g} {record.unit}{beside}{times}", flush=True)
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(list(records)), indent=2))
