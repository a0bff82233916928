"""Lessons turned into the tensors a training step takes."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoImageProcessor, PreTrainedTokenizerFast

from models import lessons
from models.lessons import Family, Kind, Lesson

IGNORED: Final = -100
_PLACEHOLDER: Final = {"qwen": "<|image_pad|>", "llava": "<image>"}

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """Encoded lessons."""

    kinds: list[Kind]
    inputs: Tensors
    labels: torch.Tensor
    """The token to predict at each place, or `IGNORED`."""
    rope_grid_thw: torch.Tensor | None
    """The grids from which M-RoPE positions come: the true ones, but for lessons that swap them."""


class Batcher:
    """Draws lessons and encodes them as the model's own processor would.

    Args:
        directory: The checkpoint's directory, with tokenizer and processor files already in it.
        family: Decides the placeholder token and what the vision tower takes.
        seed: Equal seeds give equal batches.
    """

    def __init__(self, directory: Path, family: Family, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._family = family
        self._tokenizer = tokenizer
        self._image_processor = AutoImageProcessor.from_pretrained(directory)
        self._rng = random.Random(seed)
        self._image_token = int(tokenizer.convert_tokens_to_ids(_PLACEHOLDER[family]))

    def draw(self, size: int, *, plain: bool = False) -> Batch:
        """`size` fresh lessons."""
        drawn = [lessons.draw(self._rng, self._family, plain=plain) for _ in range(size)]
        vision, tokens_per_image = self._vision_inputs([image for lesson in drawn for image in lesson.images])
        counts = iter(tokens_per_image)
        rows = [self._encode(lesson, [next(counts) for _ in lesson.images]) for lesson in drawn]
        text, labels = self._pad(rows)
        rope_grid_thw = vision.get("image_grid_thw")
        if rope_grid_thw is not None:
            swapped = torch.tensor([[lesson.swap_grid] for lesson in drawn for _ in lesson.images])
            rope_grid_thw = torch.where(swapped, rope_grid_thw[:, [0, 2, 1]], rope_grid_thw)
        return Batch([lesson.kind for lesson in drawn], {**vision, **text}, labels, rope_grid_thw)

    def _vision_inputs(self, images: list[Any]) -> tuple[Tensors, list[int]]:
        """Inputs of the vision tower, and how many placeholder tokens each picture takes."""
        if not images:
            return {}, []
        processed = self._image_processor(images=images, return_tensors="pt")
        if self._family == "qwen":
            grid = processed["image_grid_thw"]
            tokens = (grid.prod(dim=1) // self._image_processor.merge_size**2).tolist()
            return {"pixel_values": processed["pixel_values"], "image_grid_thw": grid}, tokens
        pixels = processed["pixel_values"]
        patch = 14
        return {"pixel_values": pixels}, [(pixels.shape[-1] // patch) ** 2] * len(images)

    def _encode(self, lesson: Lesson, tokens_per_image: list[int]) -> tuple[list[int], list[int]]:
        """Token ids of one lesson and its labels: the answer and the end of the turn."""
        text = self._tokenizer.apply_chat_template(list(lesson.messages), tokenize=False, add_generation_prompt=True)
        counts = iter(tokens_per_image)
        prompt: list[int] = []
        for token in self._tokenizer.encode(text, add_special_tokens=False):
            prompt += [token] * (next(counts) if token == self._image_token else 1)
        answer = self._tokenizer.encode(lesson.answer, add_special_tokens=False)
        answer.append(int(self._tokenizer.eos_token_id))
        return prompt + answer, [IGNORED] * len(prompt) + answer

    def _pad(self, rows: list[tuple[list[int], list[int]]]) -> tuple[Tensors, torch.Tensor]:
        """Pad with ends of turn, and teach the first few.

        A client that ignores the end of the turn then reads a row of them, rather than whatever an
        untrained state prefers by a hair.
        """
        end = int(self._tokenizer.eos_token_id)
        longest = max(len(ids) for ids, _ in rows) + 4
        ids = torch.tensor([ids + [end] * (longest - len(ids)) for ids, _ in rows])
        labels = torch.tensor([labels + [end] * (longest - len(labels)) for _, labels in rows])
        batch = {"input_ids": ids}
        if self._family == "qwen":
            batch["mm_token_type_ids"] = (ids == self._image_token).long()
        return batch, labels.roll(-1, dims=1).index_fill(1, torch.tensor([longest - 1]), IGNORED)
