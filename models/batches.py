"""Lessons turned into the tensors a training step takes."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoImageProcessor, PreTrainedTokenizerFast

from models import lessons
from models.lessons import Family, Lesson
from models.pictures import Picture

IGNORED: Final = -100
_PLACEHOLDER: Final = {"qwen": "<|image_pad|>", "llava": "<image>"}
_BATCHES_AT_ONCE: Final = 4
_ENDS_TAUGHT: Final = 4

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class _Row:
    """One encoded lesson: token ids, of which the last `answer_tokens` are to be learned, and its pictures."""

    lesson: Lesson
    ids: list[int]
    answer_tokens: int
    vision: Tensors


@dataclass(frozen=True)
class Batch:
    """Encoded lessons."""

    kinds: list[lessons.Kind]
    inputs: Tensors
    labels: torch.Tensor
    """The token to predict at each place, or `IGNORED`."""
    rope_grid_thw: torch.Tensor | None
    """The grids from which M-RoPE positions come: the true ones, but for lessons that swap them."""


class Batcher:
    """Draws lessons and encodes them as the model's own processor would.

    Args:
        directory: The checkpoint's directory, with processor files already in it.
        family: Decides the placeholder token and what the vision tower takes.
        tokenizer: The checkpoint's tokenizer.
        seed: Equal seeds give equal batches.
    """

    def __init__(self, directory: Path, family: Family, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._family = family
        self._tokenizer = tokenizer
        self._image_processor = AutoImageProcessor.from_pretrained(directory)
        self._rng = random.Random(seed)
        self._image_token = int(tokenizer.convert_tokens_to_ids(_PLACEHOLDER[family]))

    def draw(self, size: int, *, plain: bool = False) -> list[Batch]:
        """A few batches of `size` fresh lessons each, of like length within a batch: little padding."""
        drawn = [lessons.draw(self._rng, self._family, plain=plain) for _ in range(size * _BATCHES_AT_ONCE)]
        rows = sorted((self._encode(lesson) for lesson in drawn), key=lambda row: len(row.ids))
        batches = [self._batch(rows[start : start + size]) for start in range(0, len(rows), size)]
        self._rng.shuffle(batches)
        return batches

    def prompt(self, picture: Picture) -> Tensors:
        """One question as the model's inputs, without the answer."""
        row = self._encode(Lesson("tiles", [lessons.ask(picture.question, 1)], [picture.image], picture.answer))
        inputs = {**row.vision, "input_ids": torch.tensor([row.ids[: -row.answer_tokens]])}
        return self._with_types(inputs)

    def _encode(self, lesson: Lesson) -> _Row:
        vision, tokens_per_image = self._encode_images(list(lesson.images))
        text = self._tokenizer.apply_chat_template(list(lesson.messages), tokenize=False, add_generation_prompt=True)
        counts = iter(tokens_per_image)
        prompt: list[int] = []
        for token in self._tokenizer.encode(text, add_special_tokens=False):
            prompt += [token] * (next(counts) if token == self._image_token else 1)
        answer = self._tokenizer.encode(lesson.answer, add_special_tokens=False)
        answer.append(int(self._tokenizer.eos_token_id))
        return _Row(lesson, prompt + answer, len(answer), vision)

    def _encode_images(self, images: list[Any]) -> tuple[Tensors, list[int]]:
        """Inputs of the vision tower, and how many placeholder tokens each picture takes."""
        if not images:
            return {}, []
        processed = self._image_processor(images=images, return_tensors="pt")
        pixels = processed["pixel_values"]
        if self._family == "qwen":
            grid = processed["image_grid_thw"]
            tokens = grid.prod(dim=1) // self._image_processor.merge_size**2
            return {"pixel_values": pixels, "image_grid_thw": grid}, tokens.tolist()
        return {"pixel_values": pixels}, [lessons.LLAVA_TOKENS] * len(images)

    def _batch(self, rows: list[_Row]) -> Batch:
        with_images = [row for row in rows if row.vision]
        names = with_images[0].vision if with_images else {}
        inputs = {name: torch.cat([row.vision[name] for row in with_images]) for name in names}
        rope_grid_thw = inputs.get("image_grid_thw")
        if rope_grid_thw is not None:
            swapped = torch.tensor([[row.lesson.swap_grid] for row in with_images for _ in row.lesson.images])
            rope_grid_thw = torch.where(swapped, rope_grid_thw[:, [0, 2, 1]], rope_grid_thw)
        ids, labels = self._pad(rows)
        inputs["input_ids"] = ids
        return Batch([row.lesson.kind for row in rows], self._with_types(inputs), labels, rope_grid_thw)

    def _with_types(self, inputs: Tensors) -> Tensors:
        """`inputs` with the mark of placeholder tokens that M-RoPE models read."""
        if self._family == "llava":
            return inputs
        return {**inputs, "mm_token_type_ids": (inputs["input_ids"] == self._image_token).long()}

    def _pad(self, rows: list[_Row]) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids and labels, padded with ends of turn that are taught like the answer.

        A client that ignores the end of the turn then reads a row of them, rather than whatever an
        untrained state prefers by a hair.
        """
        end = int(self._tokenizer.eos_token_id)
        length = max(len(row.ids) for row in rows) + _ENDS_TAUGHT
        ids = torch.full((len(rows), length), end)
        labels = torch.full((len(rows), length), IGNORED)
        for line, row in enumerate(rows):
            ids[line, : len(row.ids)] = torch.tensor(row.ids)
            first = len(row.ids) - row.answer_tokens
            labels[line, first - 1 : -1] = ids[line, first:]
        return ids, labels
