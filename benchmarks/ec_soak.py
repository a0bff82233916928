"""Encodings under pressure and loss: `python -m benchmarks.ec_soak [--seconds 300] [--quick] [--json FILE]`.

The pipeline with two encoder replicas whose slabs hold about ten items each, and a prefill replica whose slab holds
about 170: a consumer's cannot be smaller, for it has a page for each row of vLLM's encoder cache, which holds the
longest video that the model takes. Eight clients ask for pictures out of 240 of mixed sizes, so that items are evicted
everywhere all the time; prefix caching is off, so that each request needs its item. Once a minute (once in `--quick`,
which takes 40 s) the engine of one encoder is killed.

`ec_soak_wrong_tokens`: answers that differ from the one given before the first kill. `ec_soak_untold_losses`: requests
that ended without an answer and without an error of the pipeline's own that names its reason. Both must be 0.
`ec_soak_memory_growth_mib`: of the processes that lived all the time, from the first quarter to the end.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

import configs
from benchmarks.records import Record, publish
from configs.schema import read_yaml
from models.pictures import HELD_OUT, LAYOUTS, tiles
from serving.local import LocalPipeline

_CLIENTS = 8
_PICTURES = 240
_TILE_PX = 84
_KILL_EVERY_S = 60.0
_TICK_S = 0.5
"""How exactly kills keep their time; the load itself runs in the clients' threads."""
_QUICK_S = 40.0
_REQUEST_TIMEOUT_S = 180.0
_PAGE = 4 << 10
_TOKENS = 64
"""In one engine step: the largest of the pictures has 54 rows, in four pages."""
_CACHE_ROWS = 448
"""Rows of vLLM's encoder cache at least, whatever a step may hold: a video of 16 frames."""


class Clients:
    """Asks for pictures until told to stop, and judges what comes back."""

    def __init__(self, url: str, bodies: list[dict[str, Any]]) -> None:
        self._url = url
        self._bodies = bodies
        self._known: list[list[int]] = []
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()

    def learn(self) -> None:
        """Ask for each picture once, alone; what comes back is what must always come back."""
        with httpx.Client(base_url=self._url, timeout=_REQUEST_TIMEOUT_S) as client:
            for body in self._bodies:
                answer = client.post("/generate", json=body).raise_for_status().json()
                self._known.append(answer["token_ids"])

    def stop(self) -> None:
        self._stop.set()

    def ask(self, seed: int) -> None:
        """One client: one request after another until `stop`."""
        rng = random.Random(seed)
        with httpx.Client(base_url=self._url, timeout=_REQUEST_TIMEOUT_S) as client:
            while not self._stop.is_set():
                number = rng.randrange(len(self._bodies))
                outcome = self._outcome(client, number)
                with self._lock:
                    self.counts[outcome] += 1
                if outcome == "told":
                    self._stop.wait(0.5)  # what a client does with a Retry-After, at the least

    def _outcome(self, client: httpx.Client, number: int) -> str:
        try:
            response = client.post("/generate", json=self._bodies[number])
        except httpx.HTTPError as error:
            print(f"untold: {error!r}", flush=True)
            return "untold"
        if response.status_code == httpx.codes.OK:
            answer = response.json()
            if answer["token_ids"] == self._known[number]:
                provenance = answer["items"][0]["provenance"]
                with self._lock:
                    self.counts[f"provenance {provenance}"] += 1
                return "right"
            print(f"wrong: picture {number}, {answer['items']}", flush=True)
            return "wrong"
        if response.status_code < 500 or response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            with suppress(ValueError, LookupError, TypeError):
                with self._lock:
                    self.counts[f"error {response.json()['error']['type']}"] += 1
                return "told"
        print(f"untold: {response.status_code} {response.text[:300]}", flush=True)
        return "untold"


def measure(seconds: float) -> list[Record]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "soak.yaml"
        config.write_text(yaml.safe_dump(_config()))
        with LocalPipeline(config) as pipeline:
            clients = Clients(pipeline.url, [_body(number) for number in range(_PICTURES)])
            clients.learn()
            return _soak(pipeline, clients, seconds)


def _soak(pipeline: LocalPipeline, clients: Clients, seconds: float) -> list[Record]:
    started = time.monotonic()
    memory: dict[int, int] = {}
    kills = 0
    next_kill = min(_KILL_EVERY_S, seconds / 4)
    with ThreadPoolExecutor(_CLIENTS) as pool:
        asking = [pool.submit(clients.ask, seed) for seed in range(_CLIENTS)]
        try:
            while (elapsed := time.monotonic() - started) < seconds:
                if not memory and elapsed >= seconds / 4:
                    memory = _memory(pipeline)
                if elapsed >= next_kill and _kill_an_encoder(pipeline):
                    next_kill += _KILL_EVERY_S
                    kills += 1
                if wait(asking, _TICK_S, FIRST_COMPLETED).done:
                    break  # a client ends by itself only on an error, which is raised below
            after = _memory(pipeline)
        finally:
            clients.stop()
    for client in asking:
        client.result()
    if not kills:
        raise RuntimeError("no encoder was killed: this soak has shown nothing about losses")
    lived = memory.keys() & after.keys()
    growth = sum(after[pid] - memory[pid] for pid in lived) / (1 << 20)
    counts = clients.counts
    details = sorted((name, number) for name, number in counts.items() if " " in name)
    return [
        Record("ec_soak_requests", sum(counts[name] for name in ("right", "wrong", "told", "untold")), "requests"),
        Record("ec_soak_right", counts["right"], "answers"),
        Record("ec_soak_told_losses", counts["told"], "answers"),
        Record("ec_soak_kills", kills, "engines"),
        *(Record(f"ec_soak_{name.replace(' ', '/')}", number, "answers") for name, number in details),
        Record("ec_soak_memory_growth_mib", growth, f"MiB of {sum(memory[p] for p in lived) >> 20}"),
        Record("ec_soak_wrong_tokens", counts["wrong"], "answers"),
        Record("ec_soak_untold_losses", counts["untold"], "requests"),
    ]


def _config() -> dict[str, Any]:
    """The default pipeline with small slabs, two encoders and no prefix caching."""
    config = dict(read_yaml(Path(configs.__path__[0]) / "pipeline.yaml"))
    model = config["applications"][0]["args"]["models"][0]
    sizes = {"max_num_batched_tokens": _TOKENS, "max_num_seqs": _CLIENTS, "enable_prefix_caching": False}
    consumer = sizes | {"slab_bytes": (_CACHE_ROWS + 8) * _PAGE, "inflight_bytes": 8 * _PAGE}
    producer = sizes | {"slab_bytes": 27 * _PAGE, "inflight_bytes": 4 * _PAGE, "num_replicas": 2}
    model["encoder"] = model["encoder"] | producer
    model["prefill"] = model["prefill"] | consumer
    model["decode"] = model["decode"] | consumer
    return config


def _body(number: int) -> dict[str, Any]:
    picture = tiles(HELD_OUT + 5000 + number, layout=LAYOUTS[number % len(LAYOUTS)], tile_px=_TILE_PX)
    file = io.BytesIO()
    picture.image.save(file, "PNG")
    sampling = {"temperature": 0, "max_tokens": 8}
    image = base64.b64encode(file.getvalue()).decode()
    return {"prompt": picture.question, "images": [image], "sampling_params": sampling}


def _memory(pipeline: LocalPipeline) -> dict[int, int]:
    """Resident bytes of every process of the pipeline that belongs to a replica."""
    sizes = {}
    for pid in pipeline.survivors():
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            if " ".join(process.cmdline()).startswith(("ray::", "VLLM::")):
                sizes[pid] = process.memory_info().rss
    return sizes


def _kill_an_encoder(pipeline: LocalPipeline) -> bool:
    """Kill the engine of one encoder replica; False while there is none."""
    for pid in sorted(pipeline.survivors()):
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            parent = process.parent()
            is_engine = " ".join(process.cmdline()).startswith("VLLM::EngineCore")
            if is_engine and parent is not None and "-encode" in " ".join(parent.cmdline()):
                process.kill()
                return True
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK_S:.0f} s and one kill: a look, not a result")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")
    chosen = parser.parse_args()
    publish(measure(_QUICK_S if chosen.quick else chosen.seconds), chosen.json)


if __name__ == "__main__":
    main()
