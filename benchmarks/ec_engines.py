"""From encoder output to the step that uses it: `python -m benchmarks.ec_engines [--quick] [--json FILE]`.

Two pairs of real engines with the same settings take turns: an encoder that only produces and a prefill engine that
reads, joined by our connector, and by vLLM's ECExampleConnector through files in the page cache. One picture at a time,
each a new one, passed on as soon as the encoder's engine has answered; Ray Serve's hops are not in it. The clock starts
when the encoder's output lies in its engine's encoder cache, before it is saved, and stops in the other engine when the
step that uses it has it in its cache.
"""

from __future__ import annotations

import asyncio
import copy
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any

import torch
from PIL import Image
from vllm import SamplingParams
from vllm.config import ECTransferConfig
from vllm.distributed.ec_transfer import get_ec_transfer
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems
from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.records import Record, options, percentile, publish, ratio
from ec_connector.worker import WorkerExtension
from models.registry import resolve

_MODEL = "tiny-qwen2-vl"
_PROMPT = "<|vision_start|><|image_pad|><|vision_end|>describe the image"
_SIDE_PX = 224
_SIZE = "16KiB"
"""Of one encoding: the built-in models' largest picture has 64 rows of 128 bfloat16 numbers."""
_WARM_UP = 3
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # as in the stages: the worker runs in its engine's process
}


class Watch(WorkerExtension):
    """Mixed into vLLM's worker: notes when an item is there to be saved, and when a step has loaded one."""

    def watch(self) -> None:
        connector = get_ec_transfer()
        self._times: dict[str, float] = {}
        connector.save_caches = partial(self._save, connector.save_caches)
        connector.start_load_caches = partial(self._load, connector.start_load_caches)

    def times(self) -> dict[str, float]:
        """Moments on the machine's monotonic clock, by identifier."""
        return dict(self._times)

    def _save(
        self, save: Callable[..., None], encoder_cache: dict[str, torch.Tensor], mm_hash: str, **more: Any
    ) -> None:
        self._times.setdefault(mm_hash, time.monotonic())
        save(encoder_cache=encoder_cache, mm_hash=mm_hash, **more)

    def _load(self, load: Callable[..., None], encoder_cache: dict[str, torch.Tensor], **more: Any) -> None:
        before = set(encoder_cache)
        load(encoder_cache=encoder_cache, **more)
        for identifier in encoder_cache.keys() - before:
            self._times.setdefault(identifier, time.monotonic())


class EnginePair:
    """An encoder and the prefill engine that reads from it. `refs`: whether encodings are announced by reference."""

    def __init__(self, encoder: AsyncLLM, prefill: AsyncLLM, *, refs: bool) -> None:
        self._encoder = encoder
        self._prefill = prefill
        self._refs = refs

    async def start(self) -> None:
        for engine in (self._encoder, self._prefill):
            await engine.collective_rpc("watch")

    async def pass_on(self, name: str, colour: tuple[int, int, int]) -> None:
        """Encode one picture, and prefill a prompt with it."""
        [prompt] = await self._encoder.renderer.render_cmpl_async(
            [
                {
                    "prompt": _PROMPT,
                    "multi_modal_data": {"image": [Image.new("RGB", (_SIDE_PX, _SIDE_PX), colour)]},
                    "multi_modal_uuids": {"image": [name]},
                }
            ]
        )
        encoded = await _run(self._encoder, prompt, name)
        if self._refs:
            wanted = {name: {"ref": encoded.ec_transfer_params[name]["ref"]}}
            await _run(self._prefill, _without_tensors(prompt), name, {"ec_transfer_params": wanted})
        else:
            await _run(self._prefill, prompt, name)

    async def microseconds(self) -> dict[str, float]:
        """From the encoder's output to the step that used it, by name."""
        [began], [ended] = [await engine.collective_rpc("times") for engine in (self._encoder, self._prefill)]
        return {name: 1e6 * (ended[name] - at) for name, at in began.items() if name in ended}

    def close(self) -> None:
        self._encoder.shutdown()
        self._prefill.shutdown()


async def measure(repeats: int) -> list[Record]:
    """p50 and p99 of both pairs, in microseconds.

    Raises:
        RuntimeError: An item did not come through its connector.
    """
    names = [f"picture-{number}" for number in range(_WARM_UP + repeats)]
    async with _pairs() as pairs:
        for number, name in enumerate(names):
            colour = (number % 256, 7 * number % 256, 31 * number % 256)
            for pair in pairs.values():
                await pair.pass_on(name, colour)
        times = {who: await pair.microseconds() for who, pair in pairs.items()}
    taken = {who: [found[name] for name in names[_WARM_UP:] if name in found] for who, found in times.items()}
    if any(len(each) < repeats for each in taken.values()):
        raise RuntimeError(f"{ {who: len(each) for who, each in taken.items()} } of {repeats} items came through")
    return [
        ratio(f"ec_engines_p{share}_us/ec_example_disk/{_SIZE}", *_both(taken, share / 100), "us") for share in (50, 99)
    ]


def _both(taken: Mapping[str, list[float]], share: float) -> tuple[float, float]:
    return percentile(taken["ours"], share), percentile(taken["ec_example_disk"], share)


@asynccontextmanager
async def _pairs() -> AsyncIterator[dict[str, EnginePair]]:
    pairs: dict[str, EnginePair] = {}
    with tempfile.TemporaryDirectory() as folder, _environment(_ENVIRONMENT | {"VLLM_RPC_BASE_PATH": folder}):
        ours = {"control_host": "127.0.0.1", "secret_hex": "5e" * 32, "slab_bytes": 32 << 20, "inflight_bytes": 4 << 20}
        files = {"shared_storage_path": folder}
        try:
            pairs["ours"] = EnginePair(
                _engine("TriptychECConnector", "ec_producer", ours, "ec_connector.connector"),
                _engine("TriptychECConnector", "ec_both", ours, "ec_connector.connector"),
                refs=True,
            )
            pairs["ec_example_disk"] = EnginePair(
                _engine("ECExampleConnector", "ec_producer", files),
                _engine("ECExampleConnector", "ec_consumer", files),
                refs=False,
            )
            for pair in pairs.values():
                await pair.start()
            yield pairs
        finally:
            for pair in pairs.values():
                pair.close()


def _engine(connector: str, role: str, extra: dict[str, Any], module: str | None = None) -> AsyncLLM:
    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=resolve(f"builtin:{_MODEL}"),
            max_model_len=1024,
            max_num_batched_tokens=1024,
            enforce_eager=True,
            dtype="bfloat16",
            gpu_memory_utilization=0.05,
            kv_cache_memory_bytes=64 << 20,
            mm_processor_cache_gb=0,
            limit_mm_per_prompt={"image": 4, "video": 0},
            distributed_executor_backend="uni",
            worker_extension_cls="benchmarks.ec_engines.Watch",
            ec_transfer_config=ECTransferConfig(
                ec_connector=connector,
                ec_connector_module_path=module,
                ec_role=role,
                ec_connector_extra_config=extra,
            ),
        )
    )


async def _run(engine: AsyncLLM, prompt: Any, name: str, extra: dict[str, Any] | None = None) -> Any:
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, extra_args=extra)
    last = None
    async for output in engine.generate(copy.copy(prompt), sampling, f"{name}-{os.urandom(4).hex()}"):
        last = output
    return last


def _without_tensors(prompt: Any) -> Any:
    """The prompt with its item's metadata alone."""
    kept = [
        MultiModalKwargsItem({key: element for key, element in item.items() if element.field.keep_on_cpu})
        for item in prompt["mm_kwargs"]["image"]
    ]
    return prompt | {"mm_kwargs": MultiModalKwargsItems({"image": kept})}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables that the engines' processes inherit."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def main() -> None:
    chosen = options(__doc__)
    publish(asyncio.run(measure(repeats=20 if chosen.quick else 200)), chosen.json)


if __name__ == "__main__":
    main()
