"""A picture of `benchmarks.serve`'s results, where matplotlib is installed (`pip install triptych[plot]`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

__all__ = ["write_plot"]

_SHOWN = {"requests_per_s": "requests/s", "ttft_p50_ms": "TTFT p50, ms", "e2e_p50_ms": "E2E p50, ms"}


def write_plot(values: Mapping[str, Mapping[str, Mapping[str, float]]], json_file: Path) -> Path | None:
    """Draw bars by cell and contender into an SVG beside `json_file`. None where matplotlib is missing.

    Args:
        values: By cell, contender and metric.
        json_file: Where the records went.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    cells = list(values)
    figure = Figure(figsize=(2 + 0.6 * len(cells), 3 * len(_SHOWN)), layout="constrained")
    for axes, (metric, label) in zip(figure.subplots(len(_SHOWN), 1, sharex=True), _SHOWN.items(), strict=True):
        names = list(next(iter(values.values())))
        for place, name in enumerate(names):
            width = 0.8 / len(names)
            heights = [values[cell][name][metric] for cell in cells]
            axes.bar([index + place * width for index in range(len(cells))], heights, width, label=name, align="edge")
        axes.set_ylabel(label)
        axes.legend(loc="upper left")
        axes.set_xticks([index + 0.4 for index in range(len(cells))], cells, rotation=90)
    file = json_file.with_suffix(".svg")
    figure.savefig(file)
    return file
