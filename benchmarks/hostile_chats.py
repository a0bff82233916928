"""Conversations and other text requests with one thing wrong. Each says what a right answer to it is."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from benchmarks.hostile_target import Attempt, Body, Must, Mutation, Target, image, png


def _posted(path: str, make: Callable[[random.Random, Target], Body], must: Must = "be refused") -> Mutation:
    def mutate(name: str, rng: random.Random, target: Target) -> Attempt:
        body = make(rng, target)
        return Attempt(name, path, msgspec.json.encode({"stream": rng.random() < 0.3, **body}), must)

    return mutate


def _chat(change: Callable[[random.Random, Body], None], must: Must = "be refused") -> Mutation:
    def make(rng: random.Random, target: Target) -> Body:
        content = [image(png(rng.randrange(50)))]
        body = {"model": target.model, "max_tokens": 8, "messages": [{"role": "user", "content": content}]}
        change(rng, body)
        return body

    return _posted("/v1/chat/completions", make, must)


def _chat_kv(rng: random.Random, body: Body) -> None:
    body["kv_transfer_params"] = {"do_remote_prefill": True, "remote_block_ids": [[0]]}


def _chat_xargs(rng: random.Random, body: Body) -> None:
    body["vllm_xargs"] = {rng.choice(["kv_transfer_params", "ec_transfer_params"]): "x"}


def _chat_media(rng: random.Random, body: Body) -> None:
    whole = png(rng.randrange(50))
    bad = rng.choice([
        "data:image/png;base64,", "data:image/png;base64,%%%", f"data:image/png;base64,{whole[: len(whole) // 2]}",
        "http://127.0.0.1:9/x.png", "http://169.254.169.254/latest", "file:///etc/passwd", "ftp://x/y", "",
        "data:image/png;base64," + base64.b64encode(b"PK\x03\x04" + b"z" * 200).decode(), "data:,x", "x" * 100_000,
        "http://localhost:8000/", "https://[::1]/x.png", "data:image/svg+xml;base64,PHN2Zy8+",
    ])  # fmt: skip
    body["messages"][0]["content"] = [image(bad) | {"image_url": {"url": bad}}]


def _huge_image(rng: random.Random, body: Body) -> None:
    """A few hundred kilobytes that decode to many megapixels."""
    side = rng.choice([20_000, 60_000, 2**31 - 1])
    body["messages"][0]["content"] = [image(base64.b64encode(blank_png(side, rng.choice([side, 1]))).decode())]


def blank_png(width: int, height: int) -> bytes:
    """A PNG of one bit a pixel, all of them 0."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row_bytes = min(width * height // 8, 200_000_000)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    packed = zlib.compress(bytes(min(row_bytes, 50_000_000)), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def _chat_shape(rng: random.Random, body: Body) -> None:
    def content(part: Any) -> list[Body]:
        return [{"role": "user", "content": [part]}]

    body["messages"] = rng.choice([
        [], None, [{"role": 1, "content": "x"}], "x", [None], content(None), content({}),
        content({"type": "image_embeds", "image_embeds": "AAAA"}),
        content({"type": "image_embeds", "image_embeds": {}}),
        content({"type": "image_url"}), content({"type": "video_url"}), content({"type": "nonsense"}),
        content({"type": "image_url", "image_url": None, "uuid": f"never-seen-{rng.random()}"}),
        content({"type": "image_url", "image_url": {"url": 7}}), content({"type": "input_audio", "input_audio": {}}),
    ])  # fmt: skip


def _chat_model(rng: random.Random, body: Body) -> None:
    body["model"] = rng.choice(["nobody", "../x", "x" * 10_000, 7, ["x"], {"a": 1}])


def _chat_too_many(rng: random.Random, body: Body) -> None:
    body["messages"][0]["content"] = body["messages"][0]["content"] * rng.choice([9, 100])


def _other_doors(rng: random.Random, target: Target) -> tuple[str, Body]:
    """A valid body for one of the other generating routes."""
    return rng.choice(
        [
            ("/v1/completions", {"prompt": "x", "max_tokens": 4}),
            ("/v1/responses", {"input": "x", "max_output_tokens": 16}),
            ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
        ]
    )


def _kv_elsewhere(name: str, rng: random.Random, target: Target) -> Attempt:
    """`kv_transfer_params` at the doors that remain."""
    path, body = _other_doors(rng, target)
    params = {"do_remote_prefill": True, "remote_host": "127.0.0.1"}
    form = {"kv_transfer_params": params} if rng.random() < 0.5 else {"vllm_xargs": {"kv_transfer_params": "x"}}
    return Attempt(name, path, msgspec.json.encode({"model": target.model, **body, **form}), "be refused")


CHAT_MUTATIONS: Mapping[str, Mutation] = {
    "kv_transfer_params elsewhere": _kv_elsewhere,
    "chat kv_transfer_params": _chat(_chat_kv),
    "chat vllm_xargs": _chat(_chat_xargs),
    "chat media": _chat(_chat_media),
    "chat huge image": _chat(_huge_image),
    "chat messages": _chat(_chat_shape),
    "chat model": _chat(_chat_model),
    "chat too many images": _chat(_chat_too_many),
}
