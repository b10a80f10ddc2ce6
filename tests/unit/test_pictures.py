"""Pictures of problems: read in every form, stored once, counted in tokens, never lost."""

import base64
import io
import json
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from dapo_core.checkpoint.state import read_state
from dapo_core.config.training import PromptsConfig
from dapo_core.draw.encoding import PromptEncoder
from dapo_core.draw.prompts import TokenizedPrompts
from dapo_core.draw.tokenizing import LENGTHS_FILE, tokenize_prompts, tokenized_prompts
from dapo_core.errors import DataError, ModelError
from dapo_core.model.inputs import ImageReference, ModelInput, rope_positions
from dapo_core.model.pictures import ImageProcessor
from dapo_core.model.pretrained import load_tokenizer
from downloads import DownloadError
from eval.problems import ProblemsError
from eval.problems.evaluation_sets import load_set
from flows.config import Config
from tasks.data.prepare import build_dataset
from tasks.data.sources import train_sources
from tests.checkpoints import make_state, write_state
from tests.configs import make_config
from tests.tiny_models import build_tiny
from tests.tiny_vision import FAMILIES, build_tiny_vision, write_picture

REAL = os.environ.get("DAPO_TEST_DATA")
HELD_OUT = {"problem": "Find 9 + 9.", "answer": "18"}
TEXT = {"problem": "Find 8 + 8.", "answer": "16"}
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def png(width: int = 32, height: int = 24, seed: int = 0, **options: Any) -> bytes:
    """A picture of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, **{"format": "PNG", **options})
    return content.getvalue()


def url_of(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def header_of(width: int, height: int) -> bytes:
    """A PNG that promises this size and has no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", b"") + chunk(b"IEND", b"")


def row(image: Any, number: int = 0, text: str = "<image>Find x") -> dict[str, Any]:
    return {"images": image, "problem": f"{text} + {number}.", "answer": str(number)}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        path.write_text(
            "images,problem,answer\n"
            + "".join(f"{one['images']},{one['problem']},{one['answer']}\n" for one in rows)
        )
    else:
        path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def recipe(folder: Path, train: Path, held_out: Path | None = None, **data: Any) -> Config:
    held_out = held_out or write(folder / "held_out.jsonl", [HELD_OUT])
    return make_config(data={"train": str(train), "eval": str(held_out), **data})


def prepare(config: Config, folder: Path) -> list[dict[str, Any]]:
    """The rows of train.parquet in the folder `prepared`."""
    (output := folder / "prepared").mkdir()
    build_dataset(config, output)
    return pq.read_table(output / "train.parquet").to_pylist()


def stored(folder: Path) -> dict[str, bytes]:
    """The pictures beside the prepared files by name."""
    found = (folder / "prepared").rglob("images/*")
    return {f"images/{path.name}": path.read_bytes() for path in found}


def card(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "prepared" / "data_card.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision(tmp_path_factory.mktemp("vision"))


@pytest.fixture
def server() -> Iterator[str]:
    """A server of one picture, at /a.png."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/a.png" else 404)
            self.end_headers()
            self.wfile.write(png() if self.path == "/a.png" else b"")

        def log_message(self, *_: Any) -> None:
            pass

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv"])
def test_every_form_of_a_picture_is_stored_as_one_file(
    tmp_path: Path, server: str, suffix: str
) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(png())
    url = url_of(png())
    forms: dict[str, list[Any]] = {
        ".parquet": [[{"bytes": png(), "path": None}], [{"bytes": None, "path": "pictures/a.png"}]],
        ".jsonl": [["pictures/a.png"], "pictures/a.png", {"path": "pictures/a.png"}, url],
        ".csv": ["pictures/a.png", f"{server}/a.png", url.partition(",")[2]],
    }
    rows = [row(form, number) for number, form in enumerate(forms[suffix])]
    prepared = prepare(recipe(tmp_path, write(tmp_path / f"mine{suffix}", rows)), tmp_path)
    assert len(prepared) == len(rows)
    ((name, content),) = stored(tmp_path).items()
    assert content == png()
    for number, one in enumerate(prepared):
        assert one["images"] == [name]
        assert one["prompt"] == [{"role": "user", "content": f"<image>Find x + {number}." + BOXED}]
    (found,) = [one["pictures"] for one in card(tmp_path)["sets"] if one["use"] == "train"]
    assert found == {
        "distinct": 1,
        "scaled": 0,
        "smallest": [32, 24],
        "median": [32, 24],
        "largest": [32, 24],
    }
    assert (
        "1 distinct, smallest 32 x 24 pixels"
        in (tmp_path / "prepared" / "data_card.md").read_text()
    )


def test_verls_rows_and_messages_with_parts_are_read(tmp_path: Path) -> None:
    """Places are kept, several pictures stay in order, and pictures without a place come first."""
    one, other = ({"bytes": png(seed=seed), "path": None} for seed in (1, 2))
    first, second = url_of(png(seed=1)), url_of(png(seed=2))
    parts = [
        {"type": "text", "text": "Compare "},
        {"type": "image_url", "image_url": {"url": first}},
        {"type": "text", "text": " with "},
        {"type": "image_url", "image_url": {"url": second}},
    ]
    verl = {
        "data_source": "hiyouga/geometry3k",
        "reward_model": {"ground_truth": "1"},
        "images": [one, other],
    }
    texts = ["A <image> and B <image>?", "Which is larger?"]
    chats = [{**verl, "prompt": [{"role": "user", "content": text}]} for text in texts]
    rows = prepare(recipe(tmp_path, write(tmp_path / "verl.parquet", chats)), tmp_path)
    assert [each["prompt"][-1]["content"] for each in rows] == [
        "A <image> and B <image>?",
        "<image><image>Which is larger?",
    ]
    (other_folder := tmp_path / "parts").mkdir()
    messages = {"messages": [{"role": "user", "content": parts}], "answer": "1"}
    path = write(other_folder / "x.jsonl", [messages])
    (read,) = prepare(recipe(other_folder, path), other_folder)
    assert read["problem"] == "Compare <image> with <image>"
    assert read["images"] == rows[0]["images"] == rows[1]["images"]
    assert [Path(name).suffix for name in read["images"]] == [".png", ".png"]


@pytest.mark.skipif(REAL is None, reason="needs DAPO_TEST_DATA")
def test_real_geometry3k_rows_are_prepared_as_published(tmp_path: Path) -> None:
    folder = Path(str(REAL)) / "geometry3k"
    read = [json.loads(line) for line in (folder / "sample.jsonl").read_text().splitlines()]
    files = [folder / one["images"][0] for one in read]
    rows = [
        {
            "images": [{"bytes": file.read_bytes(), "path": None}],
            "problem": one["problem"],
            "answer": one["answer"],
        }
        for one, file in zip(read, files, strict=True)
    ]
    prepared = prepare(recipe(tmp_path, write(tmp_path / "train.parquet", rows)), tmp_path)
    assert [one["problem"] for one in prepared] == [one["problem"] for one in read]
    held = [Image.open(tmp_path / "prepared" / one["images"][0]) for one in prepared]
    assert [one.size for one in held] == [Image.open(file).size for file in files]
    assert {one.mode for one in held} == {"RGB"}


FAULTS: dict[str, tuple[Any, str]] = {
    "truncated": (png()[:200], "cannot be decoded"),
    "text": (b"<svg>not a picture</svg>", "cannot be decoded"),
    "large": (header_of(10_000, 6_000), "10000 x 6000 pixels, more than 50 million"),
    "bomb": (header_of(30_000, 30_000), "more than 50 million pixels"),
    "strip": (png(10_000, 24), "10000 x 24 pixels, whose sides differ by more than 200 to 1"),
    "empty": (b"", "without content"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_unusable_pictures_are_refused_by_row(tmp_path: Path, name: str) -> None:
    content, reason = FAULTS[name]
    rows = [row([{"bytes": png(seed=number), "path": None}], number) for number in range(3)]
    rows.append(row([{"bytes": content, "path": "x.png"}], 3))
    path = write(tmp_path / "mine.parquet", rows)
    with pytest.raises(DataError, match=rf"1 of 4 rows cannot be used \(1 with .*{reason}.*row 3"):
        prepare(recipe(tmp_path, path), tmp_path)
    (folder := tmp_path / "again").mkdir()
    assert len(prepare(recipe(folder, path, max_refused_ratio=0.5), folder)) == 3


def test_files_outside_of_the_set_and_dead_links_are_refused(tmp_path: Path, server: str) -> None:
    (tmp_path / "secret.png").write_bytes(png())
    (folder := tmp_path / "set").mkdir()
    names = ["../secret.png", str(tmp_path / "secret.png"), "missing.png", f"{server}/gone.png"]
    path = write(folder / "mine.jsonl", [row(name, number) for number, name in enumerate(names)])
    with pytest.raises(DataError, match=r"2 with a picture outside .* 1 with a picture file that"):
        prepare(recipe(folder, path), folder)
    dead = recipe(folder, write(folder / "dead.jsonl", [row("http://127.0.0.1:9/a.png")]))
    with pytest.raises(DownloadError, match=r"127\.0\.0\.1:9"):
        prepare(dead, tmp_path)


def test_places_that_do_not_match_the_pictures_are_refused(tmp_path: Path) -> None:
    url = url_of(png())
    rows = [row([url], 0, "<image> and <image>"), row([], 1), {**row([url], 2), "videos": ["a"]}]
    path = write(tmp_path / "mine.jsonl", [row([url], 3), *rows])
    reasons = r"1 with 2 <image> .* 1 pictures; 1 with 1 <image> .* 0 pictures; 1 with a video"
    with pytest.raises(DataError, match=reasons):
        prepare(recipe(tmp_path, path), tmp_path)


def test_pictures_are_scaled_turned_and_flattened_once(tmp_path: Path) -> None:
    """So that training, engines and readers of the report see the same one."""
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    turned = png(40, 20, format="JPEG", exif=exif)
    clear = io.BytesIO()
    Image.new("RGBA", (40, 20), (255, 0, 0, 0)).save(clear, "PNG")
    contents = [png(200, 100), turned, clear.getvalue(), png(30, 20, format="JPEG")]
    rows = [row([{"bytes": one, "path": None}], number) for number, one in enumerate(contents)]
    path = write(tmp_path / "mine.parquet", rows)
    prepared = prepare(recipe(tmp_path, path, image_max_pixels=5000), tmp_path)
    files = [tmp_path / "prepared" / one["images"][0] for one in prepared]
    sizes = [Image.open(file).size for file in files]
    assert sizes == [(100, 50), (20, 40), (40, 20), (30, 20)]
    assert Image.open(files[2]).getpixel((5, 5)) == (255, 255, 255)
    assert files[3].read_bytes() == contents[3]
    assert card(tmp_path)["sets"][0]["pictures"]["scaled"] == 1


def test_problems_with_equal_texts_differ_by_their_pictures(tmp_path: Path) -> None:
    """In training, in the evaluation set, and between both."""
    shown = [[{"bytes": png(seed=seed), "path": None}] for seed in range(4)]
    train = [row(one, 0) for one in (shown[0], shown[1], shown[1], shown[2])]
    held_out = [row(one, 0) for one in (shown[2], shown[3])]
    paths = (write(tmp_path / "a.parquet", train), write(tmp_path / "b.parquet", held_out))
    prepared = prepare(recipe(tmp_path, *paths), tmp_path)
    assert len(prepared) == 2  # one repeated, one held out
    assert len(pq.read_table(tmp_path / "prepared" / "eval.parquet")) == 2
    assert card(tmp_path)["contamination"]["rows"] == 1
    assert len(stored(tmp_path)) == 4


def test_a_changed_picture_changes_the_key_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png())
    config = recipe(tmp_path, write(tmp_path / "mine.jsonl", [row("a.png"), HELD_OUT]))
    before = train_sources(config)[0].content()
    assert train_sources(config)[0].content() == before
    (tmp_path / "a.png").write_bytes(png(seed=1))
    assert train_sources(config)[0].content() != before


def test_texts_and_pictures_mix_and_texts_alone_have_no_column(tmp_path: Path) -> None:
    url = url_of(png())
    path = write(tmp_path / "m.jsonl", [TEXT, row([url])])
    mixed = prepare(recipe(tmp_path, path), tmp_path)
    assert [one["images"] and len(one["images"]) for one in mixed] == [None, 1]
    (folder := tmp_path / "texts").mkdir()
    (text,) = prepare(recipe(folder, write(folder / "t.jsonl", [TEXT])), folder)
    assert "images" not in text
    assert not (folder / "prepared" / "images").exists()
    with pytest.raises(ProblemsError, match="1 of 2 problems have pictures, which only chat"):
        load_set(tmp_path / "m.jsonl", api="completions")


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    """Train.parquet of three problems: with a picture, with none, with two."""
    sizes: list[list[tuple[int, int]]] = [[(40, 70)], [], [(64, 32), (33, 100)]]
    rows = [
        row([{"bytes": png(*size), "path": None} for size in shown], number, "<image>" * len(shown))
        for number, shown in enumerate(sizes)
    ]
    prepare(recipe(tmp_path, write(tmp_path / "mine.parquet", rows)), tmp_path)
    return tmp_path / "prepared" / "train.parquet"


def tokenize(prepared: Path, model: Path, most: int = 400, **keys: Any) -> TokenizedPrompts:
    data = PromptsConfig(max_prompt_tokens=most, **keys)
    output = prepared.parent.parent / "training"
    return tokenized_prompts(prepared, model, load_tokenizer(model), output, data)


def test_prompts_have_every_token_of_their_pictures(prepared: Path, model: Path) -> None:
    """40 x 70 pixels are scaled to 32 x 64, 4 x 8 patches of 8, 8 tokens of 2 x 2 patches."""
    prompts = tokenize(prepared, model)
    processor, tokenizer = ImageProcessor(model), load_tokenizer(model)
    assert [len(prompt.input.images) for prompt in prompts] == [1, 0, 2]
    assert [one.grid_thw for one in prompts[0].input.images] == [(1, 8, 4)]
    assert [one.num_tokens for one in prompts[2].input.images] == [8, 12]
    for prompt in prompts:
        ids, images = prompt.input.token_ids, prompt.input.images
        is_image = np.array(ids) == processor.token_id
        assert [ids[one.first - 1] for one in images] == [processor.token_id - 2] * len(images)
        for one in images:
            assert is_image[one.tokens].all()
            is_image[one.tokens] = False
        assert not is_image.any()
        text = tokenizer.decode(prompt.input.placeholder_ids)
        assert text.count("<|image_pad|>") == len(images)
        assert len(prompt.input.placeholder_ids) == len(ids) - sum(
            one.num_tokens - 1 for one in images
        )
    assert prompts.lengths.tolist() == [len(prompt.input.token_ids) for prompt in prompts]
    lengths = json.loads((prepared.parent.parent / "training" / LENGTHS_FILE).read_text())
    assert (lengths["num_pictures"], lengths["max_picture"]) == (3, 12)
    pixels, grids = processor.pixels(prompts[2].input.images)
    assert grids.tolist() == [[1, 4, 8], [1, 12, 4]]
    assert pixels.shape == (4 * 8 + 12 * 4, 3 * 2 * 8 * 8)


def test_held_out_prompts_have_the_tokens_of_training(prepared: Path, model: Path) -> None:
    from eval.problems.held_out import read_held_out

    problems = read_held_out(prepared).problems
    encoder = PromptEncoder(load_tokenizer(model), model, prepared.parent)
    held_out = tokenize_prompts(problems, encoder, 400)
    assert [one.input for one in held_out] == [one.input for one in tokenize(prepared, model)]


def test_pictures_that_a_model_or_the_limits_do_not_take_are_refused(
    prepared: Path, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"reads none \(model_type qwen3\)"):
        tokenize(prepared, build_tiny(tmp_path / "text", "qwen3"))
    longest = max(tokenize(prepared, model).lengths)
    with pytest.raises(DataError, match=r"lower data\.image_max_pixels .* data\.too_long=drop"):
        tokenize(prepared, model, longest - 1)
    with pytest.raises(DataError, match="a picture cannot be truncated"):
        tokenize(prepared, model, longest - 1, too_long="truncate_left")
    assert len(tokenize(prepared, model, longest - 1, too_long="drop")) == 2
    template = load_tokenizer(model)
    template.chat_template = template.chat_template.replace("<|image_pad|>", "")
    data = PromptsConfig(max_prompt_tokens=400)
    with pytest.raises(DataError, match="renders 0 of the 1 pictures of problem row-0"):
        tokenized_prompts(prepared, model, template, tmp_path / "other", data)
    prompt = tokenize(prepared, model)[0].input
    Path(prompt.images[0].path).unlink()
    with pytest.raises(DataError, match=r"cannot be read.*prepare the data again"):
        ImageProcessor(model).pixels(prompt.images)


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_transformers(family: Any, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    path = build_tiny_vision(tmp_path / "model", family)
    processor = ImageProcessor(path)
    ids, images = [5, 6], list[ImageReference]()
    for number, size in enumerate([(40, 70), (100, 33), (16, 16)]):
        file = write_picture(tmp_path / f"{number}.png", *size)
        grid = processor.grid(file)
        images.append(ImageReference(str(file), grid, len(ids) + 1, processor.num_tokens(grid)))
        ids += [7, *[processor.token_id] * images[-1].num_tokens, 8]
    ids += [9, 10, 11, 12]
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(path))
    tokens = torch.tensor([ids])
    kinds = (tokens == processor.token_id).int()
    grids = torch.tensor([one.grid_thw for one in images])
    expected = model.model.get_rope_index(tokens, kinds, image_grid_thw=grids)[0][:, 0]
    assert rope_positions(len(ids), images).tolist() == expected.tolist()
    assert rope_positions(4, ()).tolist() == [[0, 1, 2, 3]] * 3


def test_a_checkpoint_holds_references_to_pictures(tmp_path: Path) -> None:
    state = make_state(20)
    image = ImageReference("data/images/9fc1.png", (1, 4, 6), 1, 6)
    prompt = replace(state.unfinished[0].prompt, input=ModelInput((3, *[9] * 6, 4), (image,)))
    unfinished = [replace(state.unfinished[0], prompt=prompt), *state.unfinished[1:]]
    path = write_state(tmp_path, replace(state, unfinished=unfinished))
    assert read_state(path).unfinished[0].prompt == prompt
