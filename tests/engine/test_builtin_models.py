"""The built-in checkpoints answer held-out pictures, and a wrong grid shows in their words."""

import gc
from pathlib import Path
from typing import Any

import pytest

from models import evaluate, pictures, registry
from models.pictures import HELD_OUT, Picture

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]  # vLLM and torch warn a lot

_PICTURES = 40
_PROMISED = ("tiles", "shape", "text")
"""Two pictures in one prompt are taught too; how well each model knows them is in its card."""


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_built_in_model_names_what_it_sees(name: str) -> None:
    llm = evaluate.engine(registry.PREFIX + name)
    try:
        tasks = evaluate.held_out(_PICTURES, square=name == "tiny-llava")
        shares = {task: evaluate.accuracy(llm, tasks[task]) for task in _PROMISED}
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    assert all(share >= 0.95 for share in shares.values()), shares


@pytest.mark.parametrize("name", ["tiny-qwen2-vl", "tiny-qwen3-vl"])
def test_a_swapped_grid_shows_in_the_words(name: str) -> None:
    """The other half of the promise: right pixels with wrong M-RoPE positions give other words."""
    reader = GridReader(registry.resolve(registry.PREFIX + name))
    seen = [pictures.tiles(HELD_OUT + index, layout=(2, 3), tile_px=28) for index in range(10)]
    assert [reader.answer(picture, swapped=False) for picture in seen] == [picture.answer for picture in seen]
    swapped = [reader.answer(picture, swapped=True) for picture in seen]
    assert all(words.startswith("3 rows of 2:") for words in swapped), swapped


class GridReader:
    """A checkpoint in transformers, greedy, whose M-RoPE positions may come from a swapped grid."""

    def __init__(self, directory: str) -> None:
        from serving.plugin import register

        register()
        from transformers import AutoModelForImageTextToText, AutoTokenizer

        from models.batches import Batcher

        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.model = AutoModelForImageTextToText.from_pretrained(directory, dtype="float32").eval()
        self.batcher = Batcher(Path(directory), "qwen", self.tokenizer, seed=0)

    def answer(self, picture: Picture, *, swapped: bool) -> str:
        import torch

        inputs: dict[str, Any] = self.batcher.prompt(picture)
        grid = inputs["image_grid_thw"][:, [0, 2, 1]] if swapped else inputs["image_grid_thw"]
        start = inputs["input_ids"].shape[1]
        while inputs["input_ids"].shape[1] < start + 24:
            ids, types = inputs["input_ids"], inputs["mm_token_type_ids"]
            positions, _ = self.model.model.get_rope_index(ids, types, image_grid_thw=grid)
            with torch.no_grad():
                logits = self.model(**inputs, position_ids=positions, use_cache=False).logits
            token = logits[:, -1].argmax(-1, keepdim=True)
            if token.item() == self.tokenizer.eos_token_id:
                break
            inputs["input_ids"] = torch.cat([ids, token], dim=1)
            inputs["mm_token_type_ids"] = torch.cat([types, torch.zeros_like(token)], dim=1)
        return str(self.tokenizer.decode(inputs["input_ids"][0, start:])).strip()
