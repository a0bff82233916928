"""What the built-in models are taught: conversations with pictures, and the one right answer to each."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from PIL import Image

from models import pictures

UNKNOWN: Final = "sorry, this is not something that I know"
"""The answer to any other text: a sure answer, so that no prompt leaves the model undecided."""

_TILE_PX: Final = (28, 56)
_SHAPE_PX: Final = ((56, 56), (84, 84), (84, 84), (112, 112), (84, 112), (112, 84))
_SYSTEM: Final = ("You are a helpful assistant.", "Answer in few words.")
_FILLER: Final = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they"
    " which one you were all her she there would their we him been has when who will no more if out so up said"
    " what its about than into them can only other time new some could these two may first then do any like my"
    " now over such our man me even most made after also well way down should because each just those people how"
    " too little state good very make world still see own work long here get both between life being under never"
    " day same another know while last might us great old year off come since go against came right used take"
    " please tell image request test prompt token write story poem translate explain summarise city capital"
    " France weather number code Python function quick brown fox jumps lazy dog describe detail lorem ipsum dolor"
)

Family = Literal["qwen", "llava"]
Kind = Literal["tiles", "shape", "pair", "text", "unknown"]
LLAVA_TOKENS: Final = 16
"""Placeholder tokens of one LLaVA picture."""
WEIGHTS: Final[Mapping[Kind, int]] = {"tiles": 11, "shape": 8, "pair": 6, "text": 2, "unknown": 1}
"""How often each kind of lesson is drawn."""


@dataclass(frozen=True)
class Lesson:
    """A conversation that ends with a question, and the answer to learn."""

    kind: Kind
    messages: Sequence[Mapping[str, Any]]
    images: Sequence[Image.Image]
    answer: str
    swap_grid: bool = False
    """Tell the language model a grid with height and width swapped."""


def draw(rng: random.Random, family: Family, *, plain: bool = False) -> Lesson:
    """A random lesson.

    Args:
        rng: Where all that is random comes from.
        family: LLaVA gets square pictures only.
        plain: Only small single pictures and bare questions, to begin with.

    Some pictures of small tiles come with a swapped grid and the answer that goes with it. The vision tower
    sees the borders of the tiles, and without these lessons the language model would count on that instead of
    on M-RoPE: a wrong grid would not always show in the words.
    """
    kinds: list[Kind] = ["tiles", "shape"] if plain else list(WEIGHTS)
    kind = rng.choices(kinds, weights=[WEIGHTS[kind] for kind in kinds])[0]
    seen: list[pictures.Picture] = []
    if kind == "text":
        question, answer = rng.choice(list(pictures.TEXT_ANSWERS.items()))
    elif kind == "unknown":
        question, answer = noise(rng, rng.randint(1, 12)), UNKNOWN
    elif kind == "pair":
        seen = [picture(rng, family, small=rng.random() < 0.7) for _ in range(2)]
        question, answer = pictures.several(seen)
    else:
        seen = [picture(rng, family, kind, small=plain)]
        question, answer = seen[0].question, seen[0].answer
    swap_grid = kind == "tiles" and family == "qwen" and _one_token_each(seen[0]) and rng.random() < 0.4
    if swap_grid:
        answer = pictures.transposed(answer)
    messages = [ask(question, len(seen))] if plain else _dressed(rng, question, len(seen))
    return Lesson(kind, messages, [one.image for one in seen], answer, swap_grid)


def picture(rng: random.Random, family: Family, kind: Kind | None = None, *, small: bool = False) -> pictures.Picture:
    """A training picture, never one of the held-out seeds; square ones for LLaVA, whose processor crops."""
    seed = rng.randrange(pictures.HELD_OUT)
    kind = kind or rng.choice(("tiles", "shape"))
    square = family == "llava"
    if kind == "tiles":
        tile_px = _TILE_PX[0] if small or rng.random() < 0.4 else _TILE_PX[1]
        return pictures.tiles(seed, layout=(2, 2) if square else None, tile_px=tile_px)
    width, height = rng.choice(_SHAPE_PX[:1] if small else _SHAPE_PX)
    return pictures.shape(seed, size_px=(width, width if square else height))


def ask(text: str, images: int) -> Mapping[str, Any]:
    """A user's turn: pictures first, then the question."""
    parts: list[Mapping[str, Any]] = [{"type": "image"}] * images
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def _one_token_each(tiles: pictures.Picture) -> bool:
    names = [word for word in tiles.answer.replace(",", "").split() if word in pictures.COLOURS]
    return tiles.image.width * tiles.image.height == len(names) * _TILE_PX[0] ** 2


def noise(rng: random.Random, words: int) -> str:
    """Words without sense."""
    return " ".join(rng.choices(_FILLER.split(), k=words))


def corpus() -> list[str]:
    """Text from which the tokenizers take their merges: every word of a question or an answer."""
    questions = [
        *pictures.TILE_QUESTIONS,
        *pictures.SHAPE_QUESTIONS,
        *pictures.SEVERAL_QUESTIONS,
        *pictures.TEXT_ANSWERS,
    ]
    names = [f" {name}" for name in (*pictures.COLOURS, *pictures.SHAPES)] * 4
    frames = "first a; second 1 row of 2: 2 rows of 3: 3 rows of 1: first 2 rows; first 1 row; second 3 rows"
    answers = [*pictures.TEXT_ANSWERS.values(), UNKNOWN, frames]
    return [*questions, *names, *answers * 4, *_SYSTEM, _FILLER, "system user assistant USER: ASSISTANT: "]


def _dressed(rng: random.Random, question: str, images: int) -> list[Mapping[str, Any]]:
    """The question with, now and then, a system turn, an earlier turn, stray words or lower case."""
    messages: list[Mapping[str, Any]] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(_SYSTEM)})
    if rng.random() < 0.1:
        earlier, reply = rng.choice(list(pictures.TEXT_ANSWERS.items()))
        messages += [{"role": "user", "content": earlier}, {"role": "assistant", "content": reply}]
    if rng.random() < 0.1:
        question = question.lower()
    if images and rng.random() < 0.1:
        question = f"{noise(rng, rng.randint(1, 12))} {question}"
    return [*messages, ask(question, images)]
