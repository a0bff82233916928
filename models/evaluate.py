"""Measure a built-in checkpoint through a vLLM engine: `python -m models.evaluate NAME [--pictures N]`.

Held-out pictures, greedy decoding, exact answers. `NAME` may also be the directory of a fresh training run.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from PIL import Image

from models import pictures, registry
from models.pictures import HELD_OUT, Picture

_MAX_MODEL_LEN: Final = 1024


@dataclass(frozen=True)
class Case:
    """One question to ask and the answer that counts as right."""

    images: Sequence[Image.Image]
    question: str
    answer: str


def held_out(count: int, *, square: bool) -> dict[str, list[Case]]:
    """`count` cases of each task that the trainer never drew.

    Args:
        count: Pictures for each task; the text task always asks every question it knows.
        square: Only pictures that LLaVA's processor does not crop.
    """
    layout = (2, 2) if square else None
    tiles = [pictures.tiles(HELD_OUT + index, layout=layout) for index in range(count)]
    shapes = [pictures.shape(HELD_OUT + index) for index in range(count)]
    pairs = [_pair(index, tiles[index], shapes[index]) for index in range(count)]
    return {
        "tiles": [Case([one.image], one.question, one.answer) for one in tiles],
        "shape": [Case([one.image], one.question, one.answer) for one in shapes],
        "pair": pairs,
        "text": [Case([], question, answer) for question, answer in pictures.TEXT_ANSWERS.items()],
    }


def engine(model: str) -> Any:
    """A small greedy-ready `vllm.LLM` on this machine's CPU or GPU."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from serving.plugin import register

    register()  # before vLLM imports transformers, whose Qwen-VL processors need torchvision
    from vllm import LLM

    return LLM(
        model=registry.resolve(model),
        dtype="bfloat16",
        enforce_eager=True,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=_MAX_MODEL_LEN,
        limit_mm_per_prompt={"image": 2},
        seed=0,
    )


def ask(llm: Any, cases: Sequence[Case], max_tokens: int = 48) -> list[str]:
    """The greedy answer to each case."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    outputs = llm.chat([_conversation(case) for case in cases], greedy, use_tqdm=False)
    return [output.outputs[0].text.strip() for output in outputs]


def accuracy(llm: Any, cases: Sequence[Case]) -> float:
    """Share of cases answered exactly right."""
    answers = ask(llm, cases)
    return sum(answer == case.answer for answer, case in zip(answers, cases, strict=True)) / len(cases)


def _pair(index: int, tiles: Picture, shape: Picture) -> Case:
    both = [tiles, shape] if index % 2 else [shape, tiles]
    question, answer = pictures.several(both)
    return Case([one.image for one in both], question, answer)


def _conversation(case: Case) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_pil", "image_pil": image} for image in case.images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": case.question}]}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="one of " + ", ".join(registry.NAMES) + ", or a directory")
    parser.add_argument("--pictures", type=int, default=200, help="held-out pictures for each task")
    arguments = parser.parse_args()
    model = registry.PREFIX + arguments.name if arguments.name in registry.NAMES else arguments.name
    llm = engine(model)
    square = "llava" in arguments.name
    for task, cases in held_out(arguments.pictures, square=square).items():
        print(f"{arguments.name} {task}: {accuracy(llm, cases):.1%} of {len(cases)}", flush=True)


if __name__ == "__main__":
    main()
