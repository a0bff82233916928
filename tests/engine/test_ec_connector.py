"""Two real engines and the connector between them: one encodes, one prefills from what it reads."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio
from PIL import Image

from ec_connector.pool import GRANULE_BYTES
from models.registry import resolve

# vLLM, torch and their dependencies warn about one another; none of it is ours to fix.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

PROMPTS = {
    "tiny-qwen2-vl": "<|vision_start|><|image_pad|><|vision_end|>describe the image",
    "tiny-llava": "USER: <image>\ndescribe the image ASSISTANT:",
}

QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def _engine(model: str, role: str | None, extra: dict[str, Any] | None = None, **overrides: Any) -> Any:
    from vllm.config import ECTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args: dict[str, Any] = {
        "model": resolve(f"builtin:{model}"),
        "max_model_len": 1024,
        "max_num_batched_tokens": 1024,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 64 << 20,
        "enable_prefix_caching": True,
        "mm_processor_cache_gb": 0,
        "limit_mm_per_prompt": {"image": 4, "video": 0},
    }
    if role is not None:
        args["worker_extension_cls"] = "ec_connector.worker.WorkerExtension"
        args["ec_transfer_config"] = ECTransferConfig(
            ec_connector="TriptychECConnector",
            ec_connector_module_path="ec_connector.connector",
            ec_role=role,
            ec_connector_extra_config={
                "control_host": "127.0.0.1",
                "read_deadline_s": 3.0,
                "slab_bytes": 32 << 20,
                "inflight_bytes": 4 << 20,
                "secret_hex": "5e" * 32,
            }
            | (extra or {}),
        )
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**(args | overrides)))


class Pair:
    """An engine that encodes, one that reads, one that does everything alone; and prompts for them."""

    def __init__(self, model: str, size: tuple[int, int], producer: Any, consumer: Any) -> None:
        self.prompt = PROMPTS[model]
        self.size = size
        self.producer = producer
        self.consumer = consumer
        self.alone = _engine(model, None)
        self.count = 0

    async def render(self, *colours: str) -> Any:
        """A prompt with one image per colour, tensors included; identifiers are the colours."""
        images = [Image.new("RGB", self.size, colour) for colour in colours]
        text = self.prompt if len(colours) == 1 else " ".join([self.prompt] * len(colours))
        [prompt] = await self.alone.renderer.render_cmpl_async(
            [{"prompt": text, "multi_modal_data": {"image": images}, "multi_modal_uuids": {"image": list(colours)}}]
        )
        return prompt

    async def run(self, engine: Any, prompt: Any, refs: dict[str, Any] | None = None, max_tokens: int = 8) -> Any:
        from vllm import SamplingParams

        extra = {"ec_transfer_params": {i: {"ref": ref} for i, ref in (refs or {}).items()}} if refs else None
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        self.count += 1
        last = None
        async for output in engine.generate(copy.copy(prompt), sampling, f"request-{self.count}"):
            last = output
        return last

    async def encode(self, colour: str) -> dict[str, Any]:
        """The producer's announcement of one item."""
        output = await self.run(self.producer, await self.render(colour), max_tokens=1)
        return dict(output.ec_transfer_params[colour])

    async def failure(self) -> dict[str, Any]:
        """Why the last request at the consumer failed."""
        request_id = f"request-{self.count}"
        [found] = await self.consumer.collective_rpc("ec_failures", args=([request_id],))
        return dict(found[request_id])

    async def stats(self, engine: Any) -> dict[str, Any]:
        [stats] = await engine.collective_rpc("ec_stats")
        return dict(stats)

    def close(self) -> None:
        for engine in (self.producer, self.consumer, self.alone):
            engine.shutdown()
        del self.producer, self.consumer, self.alone


def without_tensors(prompt: Any) -> Any:
    """Metadata in place of tensors; nothing at all where the model has no metadata."""
    from vllm.multimodal.inputs import MultiModalKwargsItem, MultiModalKwargsItems

    kept = {
        modality: [
            MultiModalKwargsItem({k: e for k, e in item.items() if e.field.keep_on_cpu}) or None for item in items
        ]
        for modality, items in prompt["mm_kwargs"].items()
    }
    return prompt | {"mm_kwargs": MultiModalKwargsItems(kept)}


def tokens(output: Any) -> tuple[int, ...]:
    return tuple(output.outputs[0].token_ids)


@contextmanager
def quiet() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        yield


@pytest_asyncio.fixture(params=list(PROMPTS), scope="module", loop_scope="module")
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    model = request.param
    with quiet():
        engines = Pair(model, (112, 84), _engine(model, "ec_producer"), _engine(model, "ec_both"))
        yield engines
        engines.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scarce() -> AsyncIterator[Pair]:
    """Slabs of 24 and 16 items of one page each, and an encoder cache at the consumer that holds one item."""
    model, short = "tiny-llava", {"inflight_bytes": 0}
    with quiet():
        engines = Pair(
            model,
            (56, 56),
            _engine(model, "ec_producer", short | {"slab_bytes": 24 * GRANULE_BYTES, "busy_wait_s": 0.5}),
            _engine(
                model,
                "ec_both",
                short | {"slab_bytes": 16 * GRANULE_BYTES, "busy_wait_s": 60.0},
                max_num_batched_tokens=16,
                max_num_seqs=8,
            ),
        )
        yield engines
        engines.close()


@pytest.mark.asyncio(loop_scope="module")
class TestTransfer:
    async def test_tokens_equal_those_of_an_engine_that_encodes_itself(self, pair: Pair) -> None:
        prompt = await pair.render("red")
        expected = tokens(await pair.run(pair.alone, prompt))
        announced = await pair.encode("red")
        assert announced["source"] == "encoded"
        started = time.perf_counter()
        output = await pair.run(pair.consumer, without_tensors(prompt), {"red": announced["ref"]})
        print(f"prefill with a read: {time.perf_counter() - started:.4f} s")
        assert tokens(output) == expected
        params = output.ec_transfer_params["red"]
        assert params["source"] == "remote"
        assert params["transfer_s"] > 0
        assert params["ref"]["peer"] != announced["ref"]["peer"]
        assert (await pair.stats(pair.consumer))["reads"] >= 1
        assert (await pair.stats(pair.producer))["open_leases"] == 0

    async def test_the_slab_serves_a_repeat_without_reference(self, pair: Pair) -> None:
        await pair.consumer.reset_prefix_cache()
        prompt = await pair.render("red")
        expected = tokens(await pair.run(pair.alone, prompt))
        output = await pair.run(pair.consumer, without_tensors(prompt))
        assert tokens(output) == expected
        assert output.ec_transfer_params["red"]["source"] == "slab"

    async def test_two_items_of_one_prompt(self, pair: Pair) -> None:
        prompt = await pair.render("green", "blue")
        expected = tokens(await pair.run(pair.alone, prompt))
        refs = {colour: (await pair.encode(colour))["ref"] for colour in ("green", "blue")}
        assert tokens(await pair.run(pair.consumer, without_tensors(prompt), refs)) == expected

    async def test_an_item_encoded_locally_is_announced(self, pair: Pair) -> None:
        output = await pair.run(pair.consumer, await pair.render("white"))
        params = output.ec_transfer_params["white"]
        assert params["source"] == "encoded"
        assert params["ref"]["size_bytes"] == params["ref"]["shape"][0] * params["ref"]["shape"][1] * 2

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"digest": 1}, "mismatch"),
            ({"epoch": "of another start"}, "mismatch"),
            ({"peer": "tcp://127.0.0.1:9"}, "lost"),
            (None, "cache_miss"),
        ],
    )
    async def test_a_bad_reference_fails_its_request_only(
        self, pair: Pair, change: dict[str, Any] | None, reason: str
    ) -> None:
        colour = f"rgb(9,{pair.count % 200},9)"
        prompt = await pair.render(colour)
        announced = await pair.encode(colour)
        refs = None if change is None else {colour: announced["ref"] | change}
        output = await pair.run(pair.consumer, without_tensors(prompt), refs)
        assert output.outputs[0].finish_reason == "error"
        assert await pair.failure() == {"reason": reason, "identifiers": [colour]}
        text = await pair.run(pair.consumer, {"type": "token", "prompt_token_ids": [1, 2, 3]})
        assert len(tokens(text)) == 8
        good = (await pair.encode(colour))["ref"]
        expected = tokens(await pair.run(pair.alone, prompt))
        assert tokens(await pair.run(pair.consumer, without_tensors(prompt), {colour: good})) == expected
        assert (await pair.stats(pair.consumer))["filling"] == 0


@pytest.mark.asyncio(loop_scope="module")
class TestScarcity:
    async def test_items_are_evicted_between_chunks_and_requests_wait_their_turn(self, scarce: Pair) -> None:
        prompts = [
            await scarce.render(*(f"rgb({level},{level},{row})" for level in (0, 80, 160, 240))) for row in range(5)
        ]
        expected = [tokens(await scarce.run(scarce.alone, prompt)) for prompt in prompts]
        announced = [{c: (await scarce.encode(c))["ref"] for c in prompt["mm_hashes"]["image"]} for prompt in prompts]
        outputs = await asyncio.gather(
            *(
                scarce.run(scarce.consumer, without_tensors(prompt), refs)
                for prompt, refs in zip(prompts, announced, strict=True)
            )
        )
        assert [tokens(output) for output in outputs] == expected
        stats = await scarce.stats(scarce.consumer)
        assert stats["reads"] == 20
        assert stats["evictions"] >= 4
        assert stats["open_pins"] == 1, "vLLM's cache holds one item, so one view may stay"

    async def test_a_full_producer_is_busy_until_leases_end(self, scarce: Pair) -> None:
        refs = [(await scarce.encode(f"rgb({level},0,99)"))["ref"] for level in range(24)]
        assert all(refs)
        output = await scarce.run(scarce.producer, await scarce.render("rgb(0,99,0)"), max_tokens=1)
        assert output.outputs[0].finish_reason == "error"
        [failures] = await scarce.producer.collective_rpc("ec_failures", args=(None,))
        assert [failure["reason"] for failure in failures.values()] == ["busy"]
        leases = [ref["lease"] for ref in refs if ref["lease"]]
        [released] = await scarce.producer.collective_rpc("ec_release", args=(leases,))
        assert released == len(leases)
        assert (await scarce.encode("rgb(0,99,0)"))["source"] == "encoded"

    async def test_what_vllm_still_caches_is_published_again(self, scarce: Pair) -> None:
        colour = "rgb(0,0,99)"
        [announced] = await scarce.producer.collective_rpc("ec_announce", args=([colour],))
        assert announced[colour] is None, "the slab should have evicted it"
        again = await scarce.encode(colour)
        assert again["source"] != "encoded"
        prompt = await scarce.render(colour)
        expected = tokens(await scarce.run(scarce.alone, prompt))
        output = await scarce.run(scarce.consumer, without_tensors(prompt), {colour: again["ref"]})
        assert tokens(output) == expected

    async def test_a_reset_of_the_encoder_cache_lets_go_of_all_views(self, scarce: Pair) -> None:
        await scarce.consumer.reset_encoder_cache()
        await scarce.consumer.collective_rpc("ec_drop_views")
        assert (await scarce.stats(scarce.consumer))["open_pins"] == 0
        await scarce.consumer.reset_prefix_cache()
        prompt = await scarce.render("rgb(0,0,99)")
        expected = tokens(await scarce.run(scarce.alone, prompt))
        assert tokens(await scarce.run(scarce.consumer, without_tensors(prompt))) == expected
