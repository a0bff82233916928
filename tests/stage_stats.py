"""What the stage servers of a running application hold, asked by a Ray driver in a process of its own.

    python -m tests.stage_stats ADDRESS MODEL

Each line of input is answered by a line of JSON: for each stage its servers' `stats`, of several replicas the largest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from serving.local import LocalPipeline

_STAGES = ("encode", "prefill", "decode")
_ASKED = 4
"""Calls a stage, so that each of two replicas is nearly always among those asked."""


class StageStats:
    """A driver that has joined the application's Ray."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self) -> dict[str, dict[str, float]]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, "the driver has ended"
        stats: dict[str, dict[str, float]] = json.loads(answer)
        return stats

    def held(self) -> dict[str, float]:
        """What requests hold in the stages, where it is not nothing: engine requests, and leases of encodings.

        Pins are left out: an engine's own view of an encoding holds one for as long as vLLM's cache has the item.
        """
        return {
            f"{stage}.{name}": stats[name]
            for stage, stats in self.ask().items()
            for name in ("requests", "open_leases")
            if stats[name]
        }


@contextmanager
def stage_stats(pipeline: LocalPipeline, model: str) -> Iterator[StageStats]:
    """Start the driver; it ends with the context."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.stage_stats", pipeline.ray_address, model],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=pipeline.environment(),
    ) as process:
        stats = StageStats(process)
        stats.ask()
        yield stats
        assert process.stdin is not None
        process.stdin.close()


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints to stdout as it likes

    import ray
    from ray import serve

    ray.init(address=sys.argv[1], logging_level="error", log_to_driver=False)
    handles = {
        stage: serve.get_deployment_handle(f"{sys.argv[2]}-{stage}", app_name="triptych").options(method_name="stats")
        for stage in _STAGES
    }
    for _ in sys.stdin:
        answers = {stage: [handle.remote() for _ in range(_ASKED)] for stage, handle in handles.items()}
        stats: dict[str, dict[str, float]] = {stage: {} for stage in _STAGES}
        for stage, calls in answers.items():
            for call in calls:
                for name, value in call.result(timeout_s=60).items():
                    stats[stage][name] = max(value, stats[stage].get(name, 0.0))
        print(json.dumps(stats), file=out, flush=True)


if __name__ == "__main__":
    main()
