"""What the admission policy costs a request: `python -m benchmarks.admission [--quick] [--json FILE]`.

Reports the median of `check` for a two-image request beside the median of decoding the same request from
msgpack, which every hop does anyway. Digesting tensors that a client sent is reported apart: it grows with the
pixels, and only requests that name their own items need it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec

from prefill.admission import FeatureRequirement, check
from prefill.families import QwenVL
from serving.identity import payload_digest
from serving.protocol import (
    EncodingRef,
    Feature,
    Metadata,
    Placeholder,
    PrefillRequest,
    TensorInfo,
    Tensors,
    decode,
    encode,
)
from serving.references import ReferenceSigner

IMAGE_TOKEN, TEXT_TOKEN = 151655, 100
GRID = {"image_grid_thw": [1, 52, 92]}
"""A 1280x720 image in 14-pixel patches: 4784 patches, 1196 rows."""
PATCHES, ROWS, PATCH_DIM, WIDTH = 4784, 1196, 1176, 3584
TEXT_TOKENS = 200
SIGNER = ReferenceSigner(b"benchmark secret", lifetime_s=3600.0, peer_networks=["127.0.0.0/8"])
REQUIREMENT = FeatureRequirement(
    model="Qwen2-VL",
    uses_mrope=True,
    metadata_fields={"image": frozenset({"image_grid_thw"}), "video": frozenset({"video_grid_thw"})},
    max_model_len=32_768,
    vocab_size=152_064,
    max_rows_per_item=8192,
    family=QwenVL("qwen2_vl", 2, PATCH_DIM, IMAGE_TOKEN, IMAGE_TOKEN + 1),
)


class Record(msgspec.Struct):
    """One measured value. `ratio` is value over baseline; both None where there is nothing to compare with."""

    metric: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None


def tensors() -> Tensors:
    """One image's pixels as bytes, as an engine takes them that normalizes on its device."""
    info = {"pixel_values": TensorInfo((PATCHES, PATCH_DIM), "uint8"), "image_grid_thw": TensorInfo((3,), "int64")}
    return Tensors((b"header", os.urandom(PATCHES * PATCH_DIM)), dict(GRID), info)


def request_of(payloads: Sequence[Tensors | Metadata], refs: Mapping[str, EncodingRef]) -> PrefillRequest:
    token_ids: list[int] = []
    features = []
    for index, payload in enumerate(payloads):
        token_ids += [TEXT_TOKEN] * (TEXT_TOKENS // len(payloads))
        features.append(Feature("image", f"item-{index}", Placeholder(len(token_ids), ROWS), payload))
        token_ids += [IMAGE_TOKEN] * ROWS
    return PrefillRequest("request", tuple(token_ids), tuple(features), dict(refs), b"")


def reference(identifier: str) -> EncodingRef:
    size_bytes = ROWS * WIDTH * 2
    unsigned = EncodingRef(identifier, "tcp://127.0.0.1:4000", "e", 0, 1, (ROWS, WIDTH), "bfloat16", size_bytes, 7)
    return SIGNER.sign(unsigned, metadata=GRID, cache_salt=None)


def median_us(work: Callable[[], object], repeats: int) -> float:
    """Median time of one call, in microseconds."""
    work()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def run_check(request: PrefillRequest) -> object:
    verify = partial(SIGNER.verify, cache_salt=request.cache_salt)
    return check(
        REQUIREMENT, request.token_ids, request.features, request.refs, cache_salt=None, verify=verify, held={}
    )


def compare(metric: str, request: PrefillRequest, repeats: int) -> Record:
    data = encode(request)
    decoded = decode(PrefillRequest, data)
    baseline = median_us(partial(decode, PrefillRequest, data), repeats)
    value = median_us(partial(run_check, decoded), repeats)
    return Record(metric, value, "us", baseline, value / baseline)


def measure(repeats: int) -> list[Record]:
    pixels = [tensors(), tensors()]
    refs = {f"item-{index}": reference(f"item-{index}") for index in range(2)}
    digest_us = median_us(partial(payload_digest, pixels[0]), max(repeats // 50, 5))
    return [
        compare("check_two_images_by_reference_p50", request_of([Metadata(GRID), Metadata(GRID)], refs), repeats),
        compare("check_two_images_with_tensors_p50", request_of(pixels, {}), max(repeats // 10, 20)),
        compare("check_text_only_p50", PrefillRequest("r", (TEXT_TOKEN,) * TEXT_TOKENS, (), {}, b""), repeats),
        Record("digest_one_image_p50", digest_us, "us"),
        Record("digest_one_image_rate", pixels[0].size_bytes / digest_us, "MB/s"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the repetitions")
    parser.add_argument("--json", type=Path, help="write the records to this file as well")
    args = parser.parse_args()
    records = measure(200 if args.quick else 2000)
    for record in records:
        against = "" if record.baseline is None else f"   decoding {record.baseline:.1f}, ratio {record.ratio:.2f}"
        print(f"{record.metric:40} {record.value:10.1f} {record.unit}{against}")
    if args.json is not None:
        args.json.write_text(json.dumps([msgspec.structs.asdict(record) for record in records], indent=2) + "\n")


if __name__ == "__main__":
    main()
