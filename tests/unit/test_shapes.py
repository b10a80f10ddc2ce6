"""Generated pictures of shapes are disjoint, reproducible, balanced, and asked about correctly."""

import io
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from dapo_core.demo import shapes
from flows.config import resolve_config
from tasks.data.prepare import build_dataset


def _pictures(rows: list[shapes.Row]) -> set[bytes]:
    contents = (row["images"][0]["bytes"] for row in rows)
    return {Image.open(io.BytesIO(content)).tobytes() for content in contents}


def test_no_picture_of_a_training_is_held_out_whatever_the_seed() -> None:
    train = _pictures(shapes.generate_problems(1500, 3, is_held_out=False))
    assert len(train) == 1500  # none comes twice
    for seed in (3, 4):
        held_out = _pictures(shapes.generate_problems(150, seed, is_held_out=True))
        assert len(held_out) == 150
        assert not train & held_out


def test_the_seed_determines_the_rows() -> None:
    first, again, other = (shapes.generate_problems(20, seed, False) for seed in (7, 7, 8))
    assert first == again != other


def test_every_answer_is_a_quarter_of_every_subject() -> None:
    """Else the commonest answer is worth learning without a look at the picture."""
    rows = shapes.generate_problems(120, 0, is_held_out=False)
    asked = Counter((row["extra_info"]["subject"], _answer(row)) for row in rows)
    assert asked == dict.fromkeys(
        ((subject, answer) for subject in shapes.SUBJECTS for answer in "1234"), 10
    )


def _answer(row: shapes.Row) -> str:
    return str(row["reward_model"]["ground_truth"])


def test_answers_are_what_the_picture_shows() -> None:
    """Every fill colour lies in the quarter of its shape, and nothing else does."""
    for row in shapes.generate_problems(60, 1, is_held_out=True):
        image = Image.open(io.BytesIO(row["images"][0]["bytes"]))
        half, shown = shapes.SIDE // 2, {}
        for quarter in range(4):
            x, y = half * (quarter % 2), half * (quarter // 2)
            colours = image.crop((x, y, x + half, y + half)).getcolors() or []
            fills = {colour for _, colour in colours} - {shapes.BACKGROUND}
            names = [name for name, fill in shapes.COLOURS.items() if fill in fills]
            if names:
                [shown[str(quarter + 1)]] = names
        drawn = [text.split() for text in row["extra_info"]["shapes"]]
        assert shown == {quarter: colour for _, colour, quarter in drawn}
        question = row["prompt"][0]["content"].rstrip("?").split()
        if row["extra_info"]["subject"] == "count":
            assert _answer(row) == str(len(shown))
        else:
            assert [shape[2] for shape in drawn if question[-1] in shape] == [_answer(row)]


def test_prepared_problems_have_their_pictures_beside_them(tmp_path: Path) -> None:
    sizes = {"num_train": 24, "num_eval": 6}
    data = {"train": "shapes", "eval": "shapes", "shapes": sizes}
    build_dataset(resolve_config({"data": data, "model": {"source": "recipe"}}), tmp_path)
    for name, num_rows in (("train.parquet", 24), ("eval.parquet", 6)):
        rows = pq.read_table(tmp_path / name).to_pylist()
        assert len(rows) == num_rows
        for row in rows:
            [picture] = row["images"]
            assert Image.open(tmp_path / picture).size == (32, 32)
            assert row["prompt"][0]["content"].startswith("<image>")


@pytest.mark.parametrize("split", [True, False])
def test_more_pictures_extend_the_same_ones(split: bool) -> None:
    """So a smaller training uses the first problems of a larger one."""
    few, many = (shapes.generate_problems(count, 0, split) for count in (10, 30))
    assert many[:10] == few
