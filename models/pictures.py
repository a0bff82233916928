"""Synthetic pictures with a question and its one right answer, drawn from a seed.

Two kinds: grids of coloured tiles, answered row by row, and a single coloured shape. A grid of 2x3 tiles and
one of 3x2 cover the same area, so a model that is given the wrong picture grid (height and width swapped)
groups the colours into the wrong rows: position mistakes show in the words.

>>> tiles(0, layout=(2, 2)).answer
'2 rows of 2: white purple, blue black'
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from PIL import Image, ImageDraw

Rgb = tuple[int, int, int]

COLOURS: Final[Mapping[str, Rgb]] = {
    "red": (220, 30, 30),
    "green": (30, 160, 50),
    "blue": (40, 60, 220),
    "yellow": (240, 220, 40),
    "black": (20, 20, 20),
    "orange": (250, 140, 20),
    "purple": (140, 40, 170),
    "white": (250, 250, 250),
}
SHAPES: Final = ("circle", "square", "triangle", "cross")
LAYOUTS: Final = ((1, 2), (2, 1), (2, 2), (1, 3), (3, 1), (2, 3), (3, 2))
"""Rows and columns of the tile grids that the built-in models know."""

HELD_OUT: Final = 1 << 40
"""Seeds from here on are never drawn by the trainer: measure accuracy on `HELD_OUT + i`."""

TILE_QUESTIONS: Final = (
    "Name the tiles row by row.",
    "Which colours do the tiles have?",
    "List the colour of each tile.",
    "What is in this picture?",
    "Describe the image.",
)
SHAPE_QUESTIONS: Final = (
    "What shape is this?",
    "Which shape and colour do you see?",
    "Name the shape and its colour.",
    "What is in this picture?",
    "Describe the image.",
)
SEVERAL_QUESTIONS: Final = (
    "Describe each picture.",
    "What is in these pictures?",
    "Describe the images in order.",
)

TEXT_ANSWERS: Final[Mapping[str, str]] = {
    "Say hello.": "hello, how are you?",
    "Say goodbye.": "goodbye, see you soon",
    "Count to five.": "one two three four five",
    "Count down from three.": "three two one",
    "Name the colours.": " ".join(COLOURS),
    "Name the shapes.": " ".join(SHAPES),
    "Who are you?": "a tiny model that knows colours and shapes",
}
"""Questions without a picture."""

_GREY: Final = 150
_ORDINALS: Final = ("first", "second", "third", "fourth")


@dataclass(frozen=True)
class Picture:
    """A picture, a question about it, and the answer a built-in model was trained to give."""

    image: Image.Image
    question: str
    answer: str


def tiles(seed: int, *, layout: tuple[int, int] | None = None, tile_px: int = 56) -> Picture:
    """A grid of square tiles, each of one colour.

    Args:
        seed: Decides the colours, the question's words and, where it is not given, the layout.
        layout: Rows and columns, one of `LAYOUTS`.
        tile_px: Side of a tile in pixels; the models know 28 and 56.
    """
    rng = random.Random(f"tiles {seed}")
    drawn_layout = rng.choice(LAYOUTS)
    rows, columns = layout or drawn_layout
    image = Image.new("RGB", (columns * tile_px, rows * tile_px))
    draw = ImageDraw.Draw(image)
    names = [rng.choice(list(COLOURS)) for _ in range(rows * columns)]
    for index, name in enumerate(names):
        left, top = index % columns * tile_px, index // columns * tile_px
        draw.rectangle((left, top, left + tile_px - 1, top + tile_px - 1), fill=_shade(rng, COLOURS[name]))
    return Picture(image, rng.choice(TILE_QUESTIONS), _in_rows(names, columns))


def transposed(answer: str) -> str:
    """What a Qwen model reads off tiles of 28 pixels when it is told the wrong grid, height and width swapped.

    Each such tile is one placeholder token, so the same colours come in the same order, in other rows. Larger
    tiles are cut up by a wrong grid: the words change too, but have no such simple rule.
    """
    rows = answer.partition(": ")[2].split(", ")
    names = [name for row in rows for name in row.split()]
    return _in_rows(names, columns=len(rows))


def shape(seed: int, *, size_px: tuple[int, int] = (84, 84)) -> Picture:
    """One coloured shape on a grey ground, near the middle.

    Args:
        seed: Decides kind, colour, size and place of the shape and the question's words.
        size_px: Width and height of the picture; the models know 56 to 112 each.
    """
    rng = random.Random(f"shape {seed}")
    kind, colour = rng.choice(SHAPES), rng.choice(list(COLOURS))
    width, height = size_px
    image = Image.new("RGB", size_px, _shade(rng, (_GREY, _GREY, _GREY)))
    side = min(size_px)
    radius = side * rng.uniform(0.34, 0.42)
    centre = (width / 2 + side * rng.uniform(-0.06, 0.06), height / 2 + side * rng.uniform(-0.06, 0.06))
    _draw_shape(ImageDraw.Draw(image), kind, centre, radius, _shade(rng, COLOURS[colour]))
    return Picture(image, rng.choice(SHAPE_QUESTIONS), f"a {colour} {kind}")


def several(pictures: Sequence[Picture]) -> tuple[str, str]:
    """Question and answer about up to four pictures in one prompt, in the order given.

    The models were taught two at a time; their cards say how well they know it.
    """
    question = SEVERAL_QUESTIONS[sum(len(picture.question) for picture in pictures) % len(SEVERAL_QUESTIONS)]
    answers = [f"{ordinal} {picture.answer}" for ordinal, picture in zip(_ORDINALS, pictures, strict=False)]
    return question, "; ".join(answers)


def _in_rows(names: Sequence[str], columns: int) -> str:
    rows = [" ".join(names[start : start + columns]) for start in range(0, len(names), columns)]
    return f"{len(rows)} {'row' if len(rows) == 1 else 'rows'} of {columns}: " + ", ".join(rows)


def _shade(rng: random.Random, colour: Rgb) -> Rgb:
    """`colour`, a little off: a model must know colours, not pixel values."""
    red, green, blue = (max(0, min(255, value + rng.randint(-12, 12))) for value in colour)
    return red, green, blue


def _draw_shape(draw: ImageDraw.ImageDraw, kind: str, centre: tuple[float, float], radius: float, colour: Rgb) -> None:
    x, y = centre
    if kind == "circle":
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif kind == "square":
        half = radius * 0.85
        draw.rectangle((x - half, y - half, x + half, y + half), fill=colour)
    elif kind == "triangle":
        draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
    elif kind == "cross":
        arm = radius * 0.3
        draw.rectangle((x - radius, y - arm, x + radius, y + arm), fill=colour)
        draw.rectangle((x - arm, y - radius, x + arm, y + radius), fill=colour)
    else:
        raise ValueError(f"unknown shape {kind!r}")
