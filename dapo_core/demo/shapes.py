"""Dataset of the picture demo: generated pictures of shapes, and questions about them.

A picture of 32 x 32 pixels has 1 to 4 shapes of different kinds and colours, at most one in each
quarter; quarters are numbered by row. All answers are digits from 1 to 4, each for a quarter of the
problems. Whether a picture is for training or held out depends only on its pixels, so the two sets
never overlap, even between runs with different seeds.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]

DATA_SOURCE = "shapes"
SUBJECTS = ("count", "place_of_kind", "place_of_colour")
KINDS = ("square", "circle", "triangle", "cross")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (230, 200, 40),
}
NUM_QUARTERS = 4
SIDE = 32  # of a picture, in pixels
BACKGROUND = (245, 245, 245)
HELD_OUT_SHARE = 0.1  # of all possible pictures


class Shape(NamedTuple):
    """A shape and its quarter of the picture, from 1 to 4."""

    kind: str
    colour: str
    quarter: int


def generate_problems(num_rows: int, seed: int, is_held_out: bool) -> list[Row]:
    """Return rows in the DAPO-Math-17k schema with a picture each, cycling through every subject
    with every answer. Deterministic; no picture occurs twice.
    """
    rng = random.Random(f"{'eval' if is_held_out else 'train'} {seed}")
    rows: list[Row] = []
    seen: set[bytes] = set()
    while len(rows) < num_rows:
        turn, place = divmod(len(rows), len(SUBJECTS))
        shapes, text = _draw_problem(SUBJECTS[place], turn % NUM_QUARTERS + 1, rng)
        pixels, content = _draw_picture(shapes, rng)
        digest = hashlib.sha256(pixels).digest()
        if digest in seen or (digest[0] < 256 * HELD_OUT_SHARE) != is_held_out:
            continue
        seen.add(digest)
        extra_info = {
            "index": len(rows),
            "subject": SUBJECTS[place],
            "shapes": [" ".join(map(str, shape)) for shape in shapes],
        }
        rows.append(_row(text, content, str(turn % NUM_QUARTERS + 1), extra_info))
    return rows


def _row(text: str, picture: bytes, answer: str, extra_info: Row) -> Row:
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"<image>{text}"}],
        "images": [{"bytes": picture}],
        "ability": "VISION",
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": extra_info,
    }


def _draw_problem(subject: str, answer: int, rng: random.Random) -> tuple[list[Shape], str]:
    """Return shapes, and a question about them with the given answer."""
    num_shapes = answer if subject == "count" else rng.randint(1, NUM_QUARTERS)
    quarters = rng.sample(range(1, NUM_QUARTERS + 1), NUM_QUARTERS)
    if subject != "count":
        quarters.remove(answer)
        quarters.insert(0, answer)
    kinds, colours = rng.sample(KINDS, num_shapes), rng.sample(list(COLOURS), num_shapes)
    shapes = list(map(Shape, kinds, colours, quarters))
    questions = {
        "count": "How many shapes?",
        "place_of_kind": f"Which quarter has the {shapes[0].kind}?",
        "place_of_colour": f"Which quarter is {shapes[0].colour}?",
    }
    return shapes, questions[subject]


def _draw_picture(shapes: Sequence[Shape], rng: random.Random) -> tuple[bytes, bytes]:
    """Return the pixels of a picture, and its PNG. Sizes and places vary a little."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
    draw = ImageDraw.Draw(image)
    half = SIDE // 2
    for kind, colour, quarter in shapes:
        row, column = divmod(quarter - 1, 2)
        x, y = (half * each + half // 2 + rng.randint(-1, 1) for each in (column, row))
        size, fill = rng.randint(4, 6), COLOURS[colour]
        box = (x - size, y - size, x + size, y + size)
        if kind == "square":
            draw.rectangle(box, fill=fill)
        elif kind == "circle":
            draw.ellipse(box, fill=fill)
        elif kind == "triangle":
            draw.polygon([(x, y - size), (x - size, y + size), (x + size, y + size)], fill=fill)
        else:
            draw.line((x - size, y, x + size, y), fill=fill, width=3)
            draw.line((x, y - size, x, y + size), fill=fill, width=3)
    encoded = io.BytesIO()
    image.save(encoded, "PNG")
    return image.tobytes(), encoded.getvalue()
