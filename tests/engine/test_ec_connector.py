"""Two real engines and the connector between them: one encodes, one prefills from what it reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from ec_connector.pool import GRANULE_BYTES
from tests.engine.ec_engines import PROMPTS, Pair, engine, quiet, tokens, without_tensors

# vLLM, torch and their dependencies warn about one another; none of it is ours to fix.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest_asyncio.fixture(params=list(PROMPTS), scope="module", loop_scope="module")
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    model = request.param
    if model == "tiny-llava" and not request.config.getoption("whole_matrix"):
        pytest.skip("the scarce pair serves it; --whole-matrix runs both")
    with quiet():
        engines = Pair(model, (112, 84), engine(model, "ec_producer"), engine(model, "ec_both"))
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
            engine(model, "ec_producer", short | {"slab_bytes": 24 * GRANULE_BYTES, "busy_wait_s": 0.5}),
            engine(
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
