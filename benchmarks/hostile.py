"""Malformed and hostile requests against the running pipeline: `python -m benchmarks.hostile [--quick] [--json FILE]`.

Sends 3,000 requests (300 with --quick), each a valid one with one thing wrong: ranges, grids, payload bytes,
references, transfer parameters by every door, broken media, unknown names. Every answer must be 4xx, or 200 where
the change leaves a valid request. After every hundred a known-good request must give the known tokens, and `/health`
must be green. Metrics, all to be 0: `hostile_5xx`, `hostile_engine_deaths`, `hostile_wrong_tokens`,
`hostile_served_in_error` (a 200 where only a refusal is right).
"""

from __future__ import annotations

import base64
import copy
import io
import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

import configs
from benchmarks.records import Record, options, publish
from models.pictures import HELD_OUT, tiles
from serving.local import LocalPipeline

Body = dict[str, Any]
Mutation = Callable[[random.Random, Body], tuple[str, Body]]
"""Makes of a valid token-in request a path and a body that must be refused."""

_SAMPLING = {"temperature": 0, "max_tokens": 8}
_ROUTES = ("/generate", "/inference/v1/generate")
_SEED = 20_261_201


def measure(requests: int) -> list[Record]:
    rng = random.Random(_SEED)
    with LocalPipeline(Path(configs.__path__[0]) / "pipeline.yaml") as pipeline:
        client = httpx.Client(base_url=pipeline.url, timeout=120.0)
        with client:
            base = _render(client)
            known = _good(client, base)
            engines = _engines(pipeline)
            counts: Counter[str] = Counter()
            for number in range(requests):
                name, mutation = rng.choice(sorted(MUTATIONS.items()))
                path, body = mutation(rng, copy.deepcopy(base))
                response = client.post(path, json=body)
                _judge(name, response, counts)
                if number % 100 == 99:
                    counts["wrong_tokens"] += _good(client, base) != known
                    counts["5xx"] += client.get("/health").status_code != httpx.codes.OK
            deaths = len(engines - _engines(pipeline))
    return [
        Record("hostile_requests", requests, "requests"),
        Record("hostile_5xx", counts["5xx"], "answers"),
        Record("hostile_engine_deaths", deaths, "engines"),
        Record("hostile_wrong_tokens", counts["wrong_tokens"], "answers"),
        Record("hostile_served_in_error", counts["served"], "answers"),
    ]


def _judge(name: str, response: httpx.Response, counts: Counter[str]) -> None:
    if response.status_code >= 500:
        counts["5xx"] += 1
        print(f"{name}: {response.status_code} {response.text[:300]}", flush=True)
    elif response.status_code == httpx.codes.OK:
        counts["served"] += 1
        print(f"{name}: served", flush=True)


def _render(client: httpx.Client) -> Body:
    model = client.get("/v1/models").json()["data"][0]["id"]
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_png(0)}"}}
    chat = {"model": model, "messages": [{"role": "user", "content": [image, {"type": "text", "text": "Describe."}]}]}
    rendered = client.post("/v1/chat/completions/render", json=chat).raise_for_status().json()
    return {
        "model": model,
        "token_ids": rendered["token_ids"],
        "features": rendered["features"],
        "sampling_params": _SAMPLING,
    }


def _good(client: httpx.Client, base: Body) -> list[int]:
    """The tokens of the untouched request; none when it was refused."""
    response = client.post("/generate", json=base)
    tokens: list[int] = response.json()["token_ids"] if response.status_code == httpx.codes.OK else []
    return tokens


def _engines(pipeline: LocalPipeline) -> set[int]:
    found = set()
    for pid in pipeline.survivors():
        with suppress(psutil.Error):
            if " ".join(psutil.Process(pid).cmdline()).startswith("VLLM::"):
                found.add(pid)
    return found


def _png(seed: int) -> str:
    buffer = io.BytesIO()
    tiles(HELD_OUT + 9_000 + seed, layout=(2, 2)).image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def _token_in(change: Callable[[random.Random, Body], None]) -> Mutation:
    """A mutation of the token-in request itself, sent to either route, streaming or not."""

    def mutate(rng: random.Random, body: Body) -> tuple[str, Body]:
        change(rng, body)
        return rng.choice(_ROUTES), body | {"stream": rng.random() < 0.3}

    return mutate


def _chat(change: Callable[[random.Random, Body], None]) -> Mutation:
    def mutate(rng: random.Random, body: Body) -> tuple[str, Body]:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{_png(rng.randrange(50))}"}}
        chat = {"model": body["model"], "max_tokens": 8, "messages": [{"role": "user", "content": [image]}]}
        change(rng, chat)
        return "/v1/chat/completions", chat | {"stream": rng.random() < 0.3}

    return mutate


def _place(body: Body) -> dict[str, int]:
    place: dict[str, int] = body["features"]["mm_placeholders"]["image"][0]
    return place


def _longer(rng: random.Random, body: Body) -> None:
    _place(body)["length"] += rng.choice([1, 2, 500])


def _shorter(rng: random.Random, body: Body) -> None:
    _place(body)["length"] -= rng.randint(1, _place(body)["length"])


def _shifted(rng: random.Random, body: Body) -> None:
    _place(body)["offset"] += rng.choice([-1, 1, 10_000])


def _twice(rng: random.Random, body: Body) -> None:
    features = body["features"]
    for key in ("mm_hashes", "mm_placeholders", "kwargs_data", "mm_metadata"):
        if features.get(key):
            features[key]["image"] = features[key]["image"] * 2


def _ten_thousand(rng: random.Random, body: Body) -> None:
    features = body["features"]
    place = _place(body)
    features["mm_hashes"]["image"] = [f"i{n}" for n in range(10_000)]
    features["mm_placeholders"]["image"] = [{"offset": place["offset"], "length": 1}] * 10_000
    features["kwargs_data"] = features["mm_metadata"] = None


def _truncated(rng: random.Random, body: Body) -> None:
    data = body["features"]["kwargs_data"]["image"][0]
    body["features"]["kwargs_data"]["image"][0] = data[: rng.randrange(len(data) - 8)]


def _not_base64(rng: random.Random, body: Body) -> None:
    body["features"]["kwargs_data"]["image"][0] = rng.choice(["", "%%%", "é" * 40, "AAAA" * 50])


def _layout_only(rng: random.Random, body: Body) -> None:
    body["features"]["kwargs_data"] = body["features"]["mm_metadata"] = None
    body["features"]["mm_hashes"]["image"] = [
        rng.choice(["deadbeef" * 8, f"x{rng.random()}", "../../etc", "\u0000", "🙂"])
    ]


def _forged(rng: random.Random, body: Body) -> None:
    name = body["features"]["mm_hashes"]["image"][0]
    body["features"]["kwargs_data"] = None
    ref = {
        "identifier": rng.choice([name, "other"]),
        "peer": rng.choice(["tcp://127.0.0.1:22", "tcp://169.254.169.254:80", "file:///etc/passwd", "tcp://["]),
        "epoch": "e",
        "offset": rng.choice([0, -1, 2**63, None]),
        "generation": rng.choice([1, -5]),
        "shape": rng.choice([[4, 128], [-1, 0], [2**40, 2**40]]),
        "dtype": "bfloat16",
        "size_bytes": rng.choice([1024, 2**62, -1]),
        "digest": rng.choice([1, 2**64 - 1]),
        "expires_at": 4e9,
        "mac": rng.choice(["", "00" * 32, "é"]),
    }
    body["ec_transfer_params"] = {name: {"ref": ref}}


def _stray_ec(rng: random.Random, body: Body) -> None:
    body["features"]["kwargs_data"] = None
    body["ec_transfer_params"] = rng.choice([{"x": 1}, {"x": {"ref": 1}}, {"x": {"peer_host": "h"}}, {"x": {}}])


def _kv(rng: random.Random, body: Body) -> None:
    params = rng.choice([{"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1}, {"a": 1}, {}])
    where = rng.choice(["body", "extra_args"])
    if where == "body":
        body["kv_transfer_params"] = params
    else:
        body["sampling_params"] = {**_SAMPLING, "extra_args": {"kv_transfer_params": params}}


def _bad_tokens(rng: random.Random, body: Body) -> None:
    body["token_ids"] = rng.choice([[], [-1], [10**9], body["token_ids"] * 60, ["a"], None, [2**70]])


def _bad_sampling(rng: random.Random, body: Body) -> None:
    wrong: Body = rng.choice(
        [{"temperature": -1}, {"max_tokens": 0}, {"max_tokens": 10**6}, {"top_p": 2}, {"n": 0}, {"nonsense": 1},
         {"logprobs": 10**6}, {"stop": [1]}, {"structured_outputs": {"regex": "("}}]
    )  # fmt: skip
    body["sampling_params"] = {**_SAMPLING, **wrong}


def _chat_kv(rng: random.Random, body: Body) -> None:
    body[rng.choice(["kv_transfer_params"])] = {"do_remote_prefill": True, "remote_block_ids": [[0]]}


def _chat_xargs(rng: random.Random, body: Body) -> None:
    body["vllm_xargs"] = {rng.choice(["kv_transfer_params", "ec_transfer_params"]): "x"}


def _chat_media(rng: random.Random, body: Body) -> None:
    png = _png(rng.randrange(50))
    bad = rng.choice([
        "data:image/png;base64,", "data:image/png;base64,%%%", f"data:image/png;base64,{png[: len(png) // 2]}",
        "http://127.0.0.1:9/x.png", "http://169.254.169.254/latest", "file:///etc/passwd", "ftp://x/y", "",
        "data:image/png;base64," + base64.b64encode(b"PK\x03\x04" + b"z" * 200).decode(),
    ])  # fmt: skip
    body["messages"][0]["content"][0]["image_url"]["url"] = bad


def _chat_shape(rng: random.Random, body: Body) -> None:
    body["messages"] = rng.choice([
        [], None, [{"role": "user"}], [{"role": 1, "content": "x"}], "x",
        [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": "AAAA"}]}],
        [{"role": "user", "content": [{"type": "image_url"}]}], [{"role": "user", "content": [{"type": "video_url"}]}],
    ])  # fmt: skip


def _chat_model(rng: random.Random, body: Body) -> None:
    body["model"] = rng.choice(["nobody", "../x", "x" * 10_000, 7])


def _chat_too_many(rng: random.Random, body: Body) -> None:
    body["messages"][0]["content"] = body["messages"][0]["content"] * rng.choice([9, 100])


MUTATIONS: Mapping[str, Mutation] = {
    "range longer": _token_in(_longer),
    "range shorter": _token_in(_shorter),
    "range shifted": _token_in(_shifted),
    "range twice": _token_in(_twice),
    "10,000 items": _token_in(_ten_thousand),
    "payload truncated": _token_in(_truncated),
    "payload not base64": _token_in(_not_base64),
    "layout only": _token_in(_layout_only),
    "reference forged": _token_in(_forged),
    "stray ec_transfer_params": _token_in(_stray_ec),
    "kv_transfer_params": _token_in(_kv),
    "token ids": _token_in(_bad_tokens),
    "sampling": _token_in(_bad_sampling),
    "chat kv_transfer_params": _chat(_chat_kv),
    "chat vllm_xargs": _chat(_chat_xargs),
    "chat media": _chat(_chat_media),
    "chat messages": _chat(_chat_shape),
    "chat model": _chat(_chat_model),
    "chat too many images": _chat(_chat_too_many),
}

if __name__ == "__main__":
    chosen = options(__doc__)
    publish(measure(300 if chosen.quick else 3000), chosen.json)
