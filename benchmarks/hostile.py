"""Malformed and hostile requests against the running pipeline: `python -m benchmarks.hostile [--quick] [--json FILE]`.

Sends 3,000 requests (300 with --quick), a few at a time. Five of six are a valid request with one thing wrong
(`benchmarks/hostile_tokens.py`, `benchmarks/hostile_chats.py`), the others are generated from the OpenAPI description
(`benchmarks/hostile_generated.py`). Every answer must be 4xx, or a 200 where that is right, with the right tokens where
they are known. After every hundred a known-good request must give the known tokens, once from the caches and once
through every stage, and `/health` must be green. Metrics, all to be 0:

    hostile_5xx              answers of 5xx, connections lost, error events of 5xx in streams, and a red `/health`
    hostile_engine_deaths    replicas that are not the ones which the run began with
    hostile_wrong_tokens     a 200 with other tokens than the known ones, or a known-good request that failed
    hostile_served_in_error  a 200 where only a refusal is right
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import httpx
import psutil

import configs
from benchmarks.hostile_chats import CHAT_MUTATIONS
from benchmarks.hostile_generated import generated
from benchmarks.hostile_target import Attempt, Target
from benchmarks.hostile_tokens import TOKEN_MUTATIONS
from benchmarks.records import Record, options, publish
from serving.local import LocalPipeline

_SEED = 20_261_201
_BATCH = 100
_AT_ONCE = 4
_TIMEOUT_S = 120.0


def measure(requests: int) -> list[Record]:
    counts: Counter[str] = Counter()
    config = Path(configs.__path__[0]) / "pipeline.yaml"
    with (
        LocalPipeline(config) as pipeline,
        httpx.Client(base_url=pipeline.url, timeout=_TIMEOUT_S) as client,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        target = Target.prepare(client)
        replicas = _replicas(pipeline)
        stream = _attempts(target, requests)
        for number in range(requests // _BATCH):
            for found in pool.map(lambda attempt: _judge(client, target, attempt), islice(stream, _BATCH)):
                counts += found
            counts += _still_well(client, target, number)
            print(f"{(number + 1) * _BATCH} sent: {dict(sorted(counts.items()))}", flush=True)
        deaths = len(replicas - _replicas(pipeline))
    return [
        Record("hostile_requests", counts["sent"], "requests"),
        Record("hostile_refused", counts["refused"], "answers"),
        Record("hostile_5xx", counts["5xx"], "answers"),
        Record("hostile_engine_deaths", deaths, "replicas"),
        Record("hostile_wrong_tokens", counts["wrong_tokens"], "answers"),
        Record("hostile_served_in_error", counts["served_in_error"], "answers"),
    ]


def _attempts(target: Target, requests: int) -> Iterator[Attempt]:
    """Five mutations, one generated request, and so on; each mutation in turn, so that a short run has them all."""
    rng = random.Random(_SEED)
    mutations = {**TOKEN_MUTATIONS, **CHAT_MUTATIONS}
    mutated = (mutations[name](name, rng, target) for name in chain.from_iterable(repeat(sorted(mutations))))
    for attempt in generated(target.client, target.model, requests // 6 + 1, seed=_SEED):
        yield from islice(mutated, 5)
        yield attempt


def _judge(client: httpx.Client, target: Target, attempt: Attempt) -> Counter[str]:
    """Send one request, or several copies of it at once, and hold the answers against what is right."""
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(attempt.copies) as pool:
        for verdict, told in pool.map(lambda _: _verdict(client, target, attempt), range(attempt.copies)):
            counts["sent"] += 1
            counts[verdict] += 1
            if verdict not in {"refused", "served"}:
                print(f"{verdict}: {attempt.name} at {attempt.path}: {told}\n    {attempt.excerpt()}", flush=True)
    return counts


def _verdict(client: httpx.Client, target: Target, attempt: Attempt) -> tuple[str, str]:
    """`refused`, `served` or the metric that the answer counts for, and an excerpt of the answer."""
    try:
        response = client.post(attempt.path, content=attempt.body, headers={"content-type": "application/json"})
    except httpx.HTTPError as error:
        return "5xx", repr(error)
    told = f"{response.status_code} {response.text[:300]}"
    if response.status_code >= 500:
        return "5xx", told
    if response.status_code >= 400:
        return "refused", told
    events = _events(response)
    if any(isinstance(event, dict) and event.get("error") for event in events):
        return "5xx", f"{response.status_code} {response.text[-300:]}"
    if attempt.must == "be refused":
        return "served_in_error", told
    if attempt.must == "give the known tokens":
        tokens = [token for event in events for part in (event, *event.get("choices", [])) for token in _tokens(part)]
        return ("served", told) if tokens == target.tokens else ("wrong_tokens", told)
    return "served", told


def _tokens(part: dict[str, Any]) -> list[int]:
    """New tokens of an event of `/generate`, or of a choice of the other routes."""
    tokens: list[int] | None = part.get("token_ids")
    return tokens or []


def _events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON objects of an answer: one, or as many as a stream has events."""
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        lines = (line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {"))
        return [json.loads(line) for line in lines]
    with suppress(ValueError):
        content = response.json()
        return [content] if isinstance(content, dict) else []
    return []


def _still_well(client: httpx.Client, target: Target, number: int) -> Counter[str]:
    """What a known-good request shows between two batches. A tenant of its own makes every stage work anew."""
    counts: Counter[str] = Counter()
    for salt in (None, f"check-{number}"):
        response = client.post("/generate", json=target.good(salt))
        if response.status_code != httpx.codes.OK or response.json()["token_ids"] != target.tokens:
            counts["wrong_tokens"] += 1
            print(f"known-good request after batch {number}: {response.status_code} {response.text[:300]}", flush=True)
    counts["5xx"] += client.get("/health").status_code != httpx.codes.OK
    return counts


def _replicas(pipeline: LocalPipeline) -> set[int]:
    """Processes of Serve replicas; each stage's engine runs inside one."""
    found = set()
    for pid in pipeline.survivors():
        with suppress(psutil.Error):
            if " ".join(psutil.Process(pid).cmdline()).startswith("ray::ServeReplica"):
                found.add(pid)
    if not found:
        raise RuntimeError("no replica processes found")
    return found


if __name__ == "__main__":
    chosen = options(__doc__)
    publish(measure(300 if chosen.quick else 3000), chosen.json)
