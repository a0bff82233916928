"""Contenders in the same cells of a load: what was measured, as records, and which targets it met."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.records import Record, percentile, ratio

__all__ = ["Cell", "Measured", "Outcome", "Table", "Target", "records", "verdicts"]

_BASELINES = ("aggregated", "proxy")


@dataclass(frozen=True)
class Cell:
    """One point of the comparison.

    Args:
        images: Pictures a request; 0 is the text mix, whose prompts and answers vary in length.
        repeated: Share of pictures that were seen before.
        concurrency: Requests in flight.
        requests: How many are sent.
        prompt_tokens: Tokens of text, beside the pictures.
        output_tokens: Tokens of each answer; the end-of-text token does not end it.
    """

    images: int
    repeated: float
    concurrency: int
    requests: int
    prompt_tokens: int = 32
    output_tokens: int = 32

    @property
    def name(self) -> str:
        kind = f"{self.images}img/repeat{round(100 * self.repeated)}" if self.images else "text"
        return f"{kind}/c{self.concurrency}/out{self.output_tokens}"


@dataclass(frozen=True)
class Outcome:
    """Seconds of every request that succeeded; `itls` of all their chunks after the first."""

    duration_s: float
    failed: int
    ttfts: tuple[float, ...]
    itls: tuple[float, ...]
    latencies: tuple[float, ...]

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(
            self.duration_s + other.duration_s,
            self.failed + other.failed,
            self.ttfts + other.ttfts,
            self.itls + other.itls,
            self.latencies + other.latencies,
        )


@dataclass
class Measured:
    """One contender in one cell, over all rounds."""

    outcome: Outcome = field(default_factory=lambda: Outcome(0.0, 0, (), (), ()))
    cpu_s: float = 0.0
    hop_bytes: dict[str, float] = field(default_factory=dict)

    def add(self, outcome: Outcome, cpu_s: float, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Take one round: its outcome, the CPU time that it cost, and the counters of hops around it."""
        self.outcome += outcome
        self.cpu_s += cpu_s
        for stage, count in after.items():
            self.hop_bytes[stage] = self.hop_bytes.get(stage, 0.0) + count - before.get(stage, 0.0)

    @property
    def requests(self) -> int:
        """Those that succeeded.

        Raises:
            RuntimeError: None did: there is nothing to compare.
        """
        if not self.outcome.latencies:
            raise RuntimeError(f"all {self.outcome.failed} requests failed")
        return len(self.outcome.latencies)

    def values(self) -> dict[str, float]:
        """What is compared, by metric; names ending in `_ms` are latencies."""
        done = self.outcome
        latencies = {"ttft": done.ttfts, "itl": done.itls, "e2e": done.latencies}
        told = {
            f"{name}_p{round(100 * share)}_ms": 1e3 * percentile(times, share)
            for name, times in latencies.items()
            for share in (0.5, 0.99)
            if times
        }
        return told | {
            "requests_per_s": self.requests / done.duration_s,
            "cpu_s_per_request": self.cpu_s / self.requests,
        }


Table = Mapping[Cell, Mapping[str, Measured]]


def records(table: Table) -> list[Record]:
    found = [record for cell, row in table.items() for record in _of_cell(cell, row)]
    return found + list(_of_repeats(table))


def _of_cell(cell: Cell, row: Mapping[str, Measured]) -> Iterator[Record]:
    ours = row["pipeline"].values()
    for baseline in _BASELINES:
        theirs = row[baseline].values()
        for metric, value in ours.items():
            yield from _beside(f"{metric}/{baseline}/{cell.name}", value, theirs[metric])
    for name, measured in row.items():
        yield Record(f"serve/failed/{name}/{cell.name}", measured.outcome.failed, "requests")
        for stage, sent in measured.hop_bytes.items():
            yield Record(f"serve/hop_bytes/{name}/{stage}/{cell.name}", sent / measured.requests, "bytes")


def _of_repeats(table: Table) -> Iterator[Record]:
    """The pipeline with repeated pictures beside itself without."""
    for cell, row in table.items():
        bare = next((other for other in table if other.name == replace(cell, repeated=0.0).name), None)
        if cell.repeated and bare is not None:
            value, beside = (one["pipeline"].values()["ttft_p50_ms"] for one in (row, table[bare]))
            yield from _beside(f"ttft_p50_ms/repeat0/{cell.name}", value, beside)


def _beside(name: str, value: float, baseline: float) -> Iterator[Record]:
    metric = name.partition("/")[0]
    unit = "ms" if metric.endswith("_ms") else "s" if metric.startswith("cpu_s") else "1/s"
    yield ratio(f"serve/{name}", value, baseline, unit)
    if unit == "ms":
        yield Record(f"serve/{name.replace('_ms', '_overhead_ms', 1)}", value - baseline, unit)


@dataclass(frozen=True)
class Target:
    """A ratio that a metric should reach: at least `limit`, or at most."""

    metric: str
    limit: float
    at_least: bool = False

    def verdict(self, found: Mapping[str, Record]) -> str:
        reached = found[self.metric].ratio
        if reached is None:
            return f"{self.metric}: not measured"
        met = reached >= self.limit if self.at_least else reached <= self.limit
        word = "at least" if self.at_least else "at most"
        return f"{'met   ' if met else 'MISSED'} {self.metric}: ratio {reached:.3f}, wanted {word} {self.limit}"


def verdicts(found: Sequence[Record], targets: Sequence[Target]) -> list[str]:
    by_name = {record.metric: record for record in found}
    return [target.verdict(by_name) for target in targets]
