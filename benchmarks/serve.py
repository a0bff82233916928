"""The pipeline under load beside what else there is: `python -m benchmarks.serve [--quick] [--json FILE]`.

vLLM's own benchmark client sends the same requests to three contenders, on the same machine, in the same run, with the
same engine settings: the pipeline, vLLM's server with one aggregated engine, and the shape of upstream's
`disagg_epd_proxy` (benchmarks/epd_proxy.py: three of vLLM's servers, each of which renders the request again). All are
up the whole time and take turns cell by cell, in changing order, so that what else the machine does meets all alike.

A cell is named by pictures a request, share of repeated pictures, concurrency and tokens of the answer. Metrics are
`serve/WHAT/BASELINE/CELL`: the pipeline's value beside the baseline's, and the difference in ms beside each ratio of
latencies. `serve/ttft_p50_ms/repeat0/...` compares the pipeline with itself without repeated pictures.

Then comes what the load left behind: resident memory of each of the pipeline's replicas and engines beside its value
after warm-up, CPU time at rest, and processes that outlived the pipeline. The targets come last, met or not. With
`--json FILE` and matplotlib installed, a plot is written beside FILE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import configs
from benchmarks.comparison import Cell, Measured, Table, Target, records, verdicts
from benchmarks.contenders import Contender, all_contenders
from benchmarks.load import Client
from benchmarks.plot import write_plot
from benchmarks.records import Record, options, publish
from benchmarks.rest import cpu_at_rest, memory, memory_records
from configs.schema import load

_LOAD = Cell(images=1, repeated=0.0, concurrency=8, requests=48)
_ALONE = Cell(images=1, repeated=0.0, concurrency=1, requests=10, output_tokens=128)


def cells(*, quick: bool) -> list[Cell]:
    if quick:
        few = replace(_LOAD, requests=32)
        return [few, replace(few, repeated=0.9), replace(_ALONE, requests=6)]
    number = {1: 8, 8: _LOAD.requests, 16: 64}
    pictures = [
        Cell(images, repeated, concurrency, requests // (2 if images > 1 else 1))
        for images in (1, 4)
        for repeated in (0.0, 0.5, 0.9)
        for concurrency, requests in number.items()
    ]
    return [*pictures, *(Cell(0, 0.0, concurrency, requests) for concurrency, requests in number.items()), _ALONE]


def measure(*, quick: bool) -> tuple[Table, list[Record]]:
    """The cells, and what the pipeline holds and costs after them."""
    config_file = Path(configs.__path__[0]) / "pipeline.yaml"
    model = load(config_file).models[0]
    client = Client(model.served_name, model.checkpoint)
    table: dict[Cell, dict[str, Measured]] = {}
    with all_contenders(config_file) as contenders:
        for contender in contenders:
            _warm_up(client, contender)
        ours = contenders[0]
        warm = memory(ours.pids())
        for number, cell in enumerate(cells(quick=quick)):
            samples = client.samples(cell, seed=1 + number)
            row = table.setdefault(cell, {contender.name: Measured() for contender in contenders})
            for contender in contenders if number % 2 else reversed(contenders):
                cpu_s, before = contender.cpu_seconds(), contender.hop_bytes()
                outcome = client.run(contender.url, samples, cell.concurrency)
                row[contender.name].add(outcome, contender.cpu_seconds() - cpu_s, before, contender.hop_bytes())
            print(_line(cell, row), flush=True)
        used = cpu_at_rest(ours.pids, seconds=4.0 if quick else 10.0)
        left = [Record(f"serve/idle_cpu/{kind}", cores, "cores") for kind, cores in used.items()]
        left += memory_records(warm, memory(ours.pids()))
    return table, [*left, Record("serve/orphans", len(ours.pids()), "processes")]


def _warm_up(client: Client, contender: Contender) -> None:
    """Show a contender the pictures that will come again, and let it meet the largest batches and fill its caches."""
    client.run(contender.url, client.pool(), concurrency=1)
    client.run(contender.url, client.samples(replace(_LOAD, requests=16), seed=0), concurrency=8)
    client.run(contender.url, client.samples(replace(_LOAD, images=4, requests=64), seed=0), concurrency=16)


def _line(cell: Cell, row: Mapping[str, Measured]) -> str:
    """A cell as it stands, to look at while the rest is measured."""
    told = []
    for name, measured in row.items():
        values = measured.values()
        told.append(f"{name} {values['requests_per_s']:.2f}/s ttft {values['ttft_p50_ms']:.0f} ms")
    return f"{cell.name:<28} {'   '.join(told)}"


TARGETS = (
    Target(f"serve/requests_per_s/proxy/{_LOAD.name}", 1.3, at_least=True),
    Target(f"serve/ttft_p50_ms/proxy/{_LOAD.name}", 0.75),
    Target(f"serve/e2e_p50_ms/aggregated/{_ALONE.name}", 1.35),
    Target(f"serve/ttft_p50_ms/repeat0/{replace(_LOAD, repeated=0.9).name}", 0.8),
)


def main() -> None:
    chosen = options(__doc__)
    table, left = measure(quick=chosen.quick)
    found = [*records(table), *left]
    publish(found, chosen.json)
    if chosen.json is not None:
        write_plot(
            {cell.name: {name: one.values() for name, one in row.items()} for cell, row in table.items()}, chosen.json
        )
    resident = [Target(record.metric, 1.1) for record in left if record.ratio is not None]
    print("\n".join(verdicts(found, [*TARGETS, *resident])), flush=True)


if __name__ == "__main__":
    main()
