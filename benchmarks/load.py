"""Requests as vLLM's benchmark client makes them, sent by that client.

The samples come from its `random-mm` and `random` datasets. It has no notion of pictures that come again, so a share
of each request's pictures is exchanged for ones from a small pool that every contender has seen beforehand.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.benchmarks.datasets import RandomDataset, RandomMultiModalDataset, SampleRequest
from vllm.benchmarks.serve import TaskType, benchmark
from vllm.tokenizers import get_tokenizer

from benchmarks.comparison import Cell, Outcome

__all__ = ["Client"]

_POOL = 4
_IMAGE_PX = 224
"""The largest picture that the built-in models take: 64 placeholder tokens."""


class Client:
    """vLLM's benchmark client for one model.

    Args:
        model: The served name.
        checkpoint: Where its tokenizer lies.
    """

    def __init__(self, model: str, checkpoint: str) -> None:
        self._model = model
        self._tokenizer = get_tokenizer(checkpoint)

    def samples(self, cell: Cell, seed: int) -> list[SampleRequest]:
        """Requests of `cell`: other pictures and words for every seed, but the pool's."""
        if not cell.images:
            dataset = RandomDataset(random_seed=seed)
            return list(
                dataset.sample(
                    self._tokenizer,
                    cell.requests,
                    input_len=4 * cell.prompt_tokens,
                    output_len=cell.output_tokens,
                    range_ratio=0.5,
                )
            )
        fresh = self._with_images(cell, seed)
        pool = [sample.multi_modal_data[0] for sample in self.pool()]
        rng = random.Random(seed)
        return [replace(sample, multi_modal_data=_mixed(sample.multi_modal_data, pool, cell, rng)) for sample in fresh]

    def pool(self) -> list[SampleRequest]:
        """A request for each picture that will come again."""
        return self._with_images(Cell(1, 0.0, 1, _POOL, output_tokens=2), seed=0)

    def run(self, url: str, samples: Sequence[SampleRequest], concurrency: int) -> Outcome:
        """Send `samples` to a server, in order, as fast as `concurrency` allows."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            result = asyncio.run(self._benchmark(url, list(samples), concurrency))
        done = [index for index, error in enumerate(result["errors"]) if not error]
        itls = tuple(itl for index in done for itl in result["itls"][index])
        ttfts, latencies = (tuple(result[name][index] for index in done) for name in ("ttfts", "latencies"))
        return Outcome(result["duration"], result["failed"], ttfts, itls, latencies)

    async def _benchmark(self, url: str, samples: list[SampleRequest], concurrency: int) -> dict[str, Any]:
        result: dict[str, Any] = await benchmark(
            task_type=TaskType.GENERATION,
            endpoint_type="openai-chat",
            api_url=f"{url}/v1/chat/completions",
            base_url=url,
            model_id=self._model,
            model_name=self._model,
            tokenizer=self._tokenizer,
            input_requests=samples,
            logprobs=None,
            request_rate=math.inf,
            burstiness=1.0,
            disable_tqdm=True,
            num_warmups=0,
            profile=False,
            selected_percentile_metrics=["ttft", "itl", "e2el"],
            selected_percentiles=[99.0],
            ignore_eos=True,
            goodput_config_dict={},
            max_concurrency=concurrency,
            lora_modules=None,
            extra_headers=None,
            extra_body={"temperature": 0.0},
            ready_check_timeout_sec=0,
        )
        return result

    def _with_images(self, cell: Cell, seed: int) -> list[SampleRequest]:
        dataset = RandomMultiModalDataset(random_seed=seed)
        samples = dataset.sample(
            self._tokenizer,
            cell.requests,
            input_len=cell.prompt_tokens,
            output_len=cell.output_tokens,
            base_items_per_request=cell.images,
            limit_mm_per_prompt={"image": cell.images},
            bucket_config={(_IMAGE_PX, _IMAGE_PX, 1): 1.0},
        )
        return list(samples)


def _mixed(images: list[Any], pool: Sequence[Any], cell: Cell, rng: random.Random) -> list[Any]:
    return [rng.choice(pool) if rng.random() < cell.repeated else image for image in images]
