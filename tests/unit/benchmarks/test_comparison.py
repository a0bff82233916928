"""What measurements become: ratios, overheads, verdicts."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.comparison import Cell, Measured, Outcome, Target, records

CELL = Cell(images=1, repeated=0.0, concurrency=8, requests=2)


def measured(factor: float) -> Measured:
    outcome = Outcome(2.0 * factor, 0, (0.1 * factor, 0.3 * factor), (0.01 * factor,), (1.0 * factor, 2.0 * factor))
    one = Measured()
    one.add(outcome, 4.0 * factor, {"encode": 10.0}, {"encode": 30.0})
    return one


def test_ratios_overheads_and_targets() -> None:
    repeated = replace(CELL, repeated=0.9)
    table = {
        CELL: {"pipeline": measured(1.0), "aggregated": measured(0.5), "proxy": measured(2.0)},
        repeated: {"pipeline": measured(0.5), "aggregated": measured(0.5), "proxy": measured(2.0)},
    }
    found = {record.metric: record for record in records(table)}
    name = CELL.name
    assert found[f"serve/e2e_p50_ms/aggregated/{name}"].ratio == 2.0
    assert found[f"serve/e2e_p50_overhead_ms/aggregated/{name}"].value == 500.0
    assert found[f"serve/requests_per_s/proxy/{name}"].ratio == 2.0
    assert found[f"serve/cpu_s_per_request/proxy/{name}"].value == 2.0
    assert found[f"serve/hop_bytes/pipeline/encode/{name}"].value == 10.0
    assert found[f"serve/ttft_p50_ms/repeat0/{repeated.name}"].ratio == 0.5
    at_most = Target(f"serve/ttft_p50_ms/proxy/{name}", 0.75)
    assert at_most.verdict(found).startswith("met")
    assert replace(at_most, limit=0.25).verdict(found).startswith("MISSED")
    assert replace(at_most, at_least=True).verdict(found).startswith("MISSED")


def test_rounds_add_up() -> None:
    one = measured(1.0)
    one.add(Outcome(1.0, 1, (0.2,), (), (0.5,)), 1.0, {"encode": 30.0}, {"encode": 40.0})
    assert one.requests == 3
    assert one.outcome.failed == 1
    assert one.cpu_s == 5.0
    assert one.hop_bytes == {"encode": 30.0}
