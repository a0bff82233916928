"""The pictures are what their answers say, and the same for the same seed."""

import random

import pytest

from models import lessons, pictures
from models.pictures import COLOURS, LAYOUTS, Picture


def nearest_colour(pixel: tuple[int, int, int]) -> str:
    def distance(name: str) -> int:
        return sum((mine - theirs) ** 2 for mine, theirs in zip(pixel, COLOURS[name], strict=True))

    return min(COLOURS, key=distance)


def colour_at(picture: Picture, x: int, y: int) -> str:
    return nearest_colour(picture.image.getpixel((x, y)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_show_the_colours_of_the_answer_row_by_row(layout: tuple[int, int]) -> None:
    rows, columns = layout
    picture = pictures.tiles(5, layout=layout, tile_px=20)
    assert picture.image.size == (columns * 20, rows * 20)
    centres = [[(column * 20 + 10, row * 20 + 10) for column in range(columns)] for row in range(rows)]
    seen = [" ".join(colour_at(picture, x, y) for x, y in row) for row in centres]
    size, _, colours = picture.answer.partition(": ")
    assert size.split() == [str(rows), "row" if rows == 1 else "rows", "of", str(columns)]
    assert colours == ", ".join(seen)


def test_a_transposed_answer_keeps_the_order_of_the_colours() -> None:
    wide = "2 rows of 3: red green blue, black white red"
    assert pictures.transposed(wide) == "3 rows of 2: red green, blue black, white red"
    assert pictures.transposed("1 row of 2: red green") == "2 rows of 1: red, green"


def test_layouts_come_with_their_transpose() -> None:
    """Equal areas, different answers: that is what makes a swapped grid visible."""
    assert {(columns, rows) for rows, columns in LAYOUTS} == set(LAYOUTS)


@pytest.mark.parametrize("seed", range(20))
def test_a_shape_shows_its_colour_in_the_middle(seed: int) -> None:
    picture = pictures.shape(seed)
    _, colour, kind = picture.answer.split()
    assert kind in pictures.SHAPES
    pixels = {nearest_colour(pixel) for _, pixel in picture.image.getcolors(1 << 16)}
    assert colour in pixels


def same(one: Picture, other: Picture) -> bool:
    return one.image.tobytes() == other.image.tobytes() and one.answer == other.answer


def test_a_seed_decides_the_picture() -> None:
    assert same(pictures.tiles(7), pictures.tiles(7))
    assert same(pictures.shape(7), pictures.shape(7))
    assert not same(pictures.tiles(7), pictures.tiles(8))
    assert not same(pictures.shape(7), pictures.shape(8))


def test_a_forced_layout_keeps_the_rest_of_the_seed() -> None:
    seed = 3
    drawn = pictures.tiles(seed)
    words = drawn.answer.split()
    layout = (int(words[0]), int(words[3].rstrip(":")))
    assert same(drawn, pictures.tiles(seed, layout=layout))


def test_several_pictures_are_answered_in_order() -> None:
    first, second = pictures.shape(1), pictures.tiles(2)
    question, answer = pictures.several([first, second])
    assert question in pictures.SEVERAL_QUESTIONS
    assert answer == f"first {first.answer}; second {second.answer}"


def test_the_trainer_draws_every_kind_of_lesson() -> None:
    rng = random.Random(0)
    kinds = {lessons.draw(rng, "qwen").kind for _ in range(300)}
    assert kinds == set(lessons.WEIGHTS)


def test_plain_lessons_are_one_bare_question_about_one_picture() -> None:
    rng = random.Random(0)
    for _ in range(50):
        lesson = lessons.draw(rng, "qwen", plain=True)
        assert len(lesson.images) == 1
        assert len(lesson.messages) == 1


def test_llava_sees_square_pictures_only() -> None:
    rng = random.Random(0)
    images = [image for _ in range(100) for image in lessons.draw(rng, "llava").images]
    assert images
    assert all(image.width == image.height for image in images)
