"""Evaluations of problems with pictures: what is sent, stored, resumed and refused."""

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from eval import InputError
from eval.endpoint import Endpoint, Sampling
from eval.logs.exported import export_inspect
from eval.problems import ProblemsError
from eval.problems.evaluation_sets import load_set
from eval.problems.items import EvaluationSet
from eval.report import item_pages
from eval.report.item_pages import pack_items
from eval.results.rows import ResultsError, load_evaluation
from flows.cli import app
from tasks.data.prepare import build_dataset
from tests.configs import make_config
from tests.evaluations import evaluate
from tests.integration.arithmetic_server import ArithmeticServer, Handler
from tests.tiny_vision import write_picture

SAMPLING = Sampling(max_tokens=64)
PROBLEMS = [
    ("<image>Add 1 and 2.", ["a.png"], "3"),
    ("<image>Add 1 and 2.", ["b.png"], "4"),  # only its picture differs
    ("Add 2 to <image>, then 3 as in <image>.", ["b.png", "a.png"], "5"),
    ("Add 3 and 3.", [], "6"),
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of problems with the files of their pictures beside it."""
    for seed, name in enumerate(("a.png", "b.png")):
        write_picture(tmp_path / "own" / name, seed=seed)
    found = [
        {"problem": text, "answer": gold, **({"images": images} if images else {})}
        for text, images, gold in PROBLEMS
    ]
    path = tmp_path / "own" / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def asked_of(rows: Path, tmp_path: Path) -> EvaluationSet:
    """The problems as a run evaluates them: prepared as a benchmark in its own file."""
    (output := tmp_path / "prepared").mkdir()
    held_out = {"eval": "arithmetic", "arithmetic": {"num_eval": 2}}
    data = {"train": "arithmetic", **held_out}
    benchmarks = [{"set": str(rows), "name": "mine"}]
    build_dataset(make_config(data=data, evaluate={"benchmarks": benchmarks}), output)
    return load_set(output / "benchmarks" / "mine.parquet", None, "bare")


def sent_pictures(server: ArithmeticServer) -> list[list[bytes]]:
    """The pictures in each request, in order."""
    found = []
    for path, _, body in server.requests:
        assert path.endswith("/chat/completions")
        content = body["messages"][-1]["content"]
        parts = [] if isinstance(content, str) else content
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        assert all(url.startswith("data:image/png;base64,") for url in urls)
        found.append([base64.b64decode(url.partition(",")[2]) for url in urls])
    return found


def test_requests_hold_the_pictures_in_their_places_and_results_only_name_them(
    server: ArithmeticServer, rows: Path, tmp_path: Path
) -> None:
    asked, output = asked_of(rows, tmp_path), tmp_path / "results"
    summary = evaluate(asked, Endpoint(server.url, "m"), SAMPLING, output)
    assert summary.num_items == 4
    a, b = ((rows.parent / name).read_bytes() for name in ("a.png", "b.png"))
    assert sorted(sent_pictures(server)) == sorted([[a], [b], [b, a], []])
    [two] = [body for *_, body in server.requests if "then 3" in json.dumps(body)]
    kinds = [part.get("text", part["type"]) for part in two["messages"][-1]["content"]]
    assert kinds == ["Add 2 to ", "image_url", ", then 3 as in ", "image_url", "."]
    found = [row.images and len(row.images) for row in load_evaluation(output).rows]
    assert found == [1, 1, 2, None]
    assert "base64" not in (output / "results.jsonl").read_text()
    kept = {path.name: path.read_bytes() for path in (output / "images").iterdir()}
    assert sorted(kept.values()) == sorted([a, b])
    assert {name for row in load_evaluation(output).rows for name in row.images or ()} == set(kept)


def test_a_resumed_evaluation_sends_only_missing_pictures_and_another_picture_starts_over(
    server: ArithmeticServer, rows: Path, tmp_path: Path
) -> None:
    asked, output, endpoint = asked_of(rows, tmp_path), tmp_path / "o", Endpoint(server.url, "m")
    evaluate(asked, endpoint, SAMPLING, output)
    lines = (output / "results.jsonl").read_text().splitlines(keepends=True)
    (output / "results.jsonl").write_text("".join(lines[:1] + lines[2:]))
    server.requests.clear()
    evaluate(asked, endpoint, SAMPLING, output)
    assert sent_pictures(server) == [[(rows.parent / "b.png").read_bytes()]]
    write_picture(rows.parent / "b.png", seed=9)
    server.requests.clear()
    evaluate(load_set(rows, None, "bare", pictures=tmp_path), endpoint, SAMPLING, output)
    assert (output / "superseded-1").is_dir()
    assert len(server.requests) == 4


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_a_lost_picture_is_reported_before_any_request(
    server: ArithmeticServer, rows: Path, tmp_path: Path, fault: str
) -> None:
    asked = asked_of(rows, tmp_path)
    file = asked.items[0].images[0]
    if fault == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match=rf"1 of 2 pictures .* \(first: .*{file.name}\)"):
        evaluate(asked, Endpoint(server.url, "m"), SAMPLING, tmp_path / "results")
    assert server.requests == []


def test_own_files_with_pictures_are_evaluated_as_they_are(
    server: ArithmeticServer, rows: Path, tmp_path: Path
) -> None:
    """By `dapo eval --data`, also if a picture is encoded again, and a server is busy."""

    def retry_once(handler: Handler, prompt: str, attempt: int) -> bool:
        return attempt == 1 and handler.send(503, b"busy")

    server.behave = retry_once
    Image.open(rows.parent / "a.png").convert("RGBA").save(rows.parent / "a.png")
    words = ["eval", "--base-url", server.url, "--model-name", "m", "--data", str(rows)]
    output = tmp_path / "results"
    done = CliRunner().invoke(app, [*words, "--output", str(output)])
    assert done.exit_code == 0, done.output
    answered = load_evaluation(output).rows
    assert [row.verdict for row in answered] == ["right", "wrong", "right", "right"]
    assert len({*(name for row in answered for name in row.images or ())}) == 2
    (rows.parent / "b.png").write_bytes(b"<svg>no picture</svg>")
    done = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "other")])
    assert "row-1 has a picture that cannot be decoded" in str(done.exception)
    assert not (tmp_path / "other").exists()


def test_prompts_with_places_for_other_pictures_are_refused(rows: Path, tmp_path: Path) -> None:
    template = tmp_path / "two.txt"
    template.write_text("<image>{problem}")
    with pytest.raises(ProblemsError, match=r"has 2 <image>, but 1 pictures; remove <image>"):
        load_set(rows, None, str(template), pictures=tmp_path)
    with pytest.raises(ProblemsError, match=r"set evaluate\.api=chat"):
        load_set(rows, None, "bare", "completions", pictures=tmp_path)


def test_the_report_shows_the_pictures_beside_the_answers(
    server: ArithmeticServer, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, sides = asked_of(rows, tmp_path), [tmp_path / side for side in ("before", "after")]
    for side in sides:
        evaluate(asked, Endpoint(server.url, "m"), SAMPLING, side)
    server.behave = lambda handler, prompt, attempt: handler.say("\\boxed{4}")
    evaluate(asked, Endpoint(server.url, "m"), SAMPLING, tmp_path / "other")
    words = ["compare", str(sides[0]), str(tmp_path / "other"), "--output", str(tmp_path / "r")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "r" / "report.html").read_text()
    assert "img-src data:;" in page

    def urls() -> list[int]:
        packed = pack_items(*(load_evaluation(side) for side in sides))
        [chunk] = [json.loads(gzip.decompress(base64.b64decode(one))) for one in packed.chunks]
        found = [
            re.findall(r'<img [^>]*src="data:image/png;base64,([^"]+)"', body) for body in chunk
        ]
        assert all(base64.b64decode(url) in contents for one in found for url in one)
        return [len(one) for one in found]

    contents = {(rows.parent / name).read_bytes() for name in ("a.png", "b.png")}
    assert urls() == [1, 1, 2, 0]
    monkeypatch.setattr(item_pages, "MAX_PICTURE_CHARS", 10_000)
    assert urls() == [1, 1, 0, 0]


def test_exported_logs_hold_the_pictures(
    server: ArithmeticServer, rows: Path, tmp_path: Path
) -> None:
    asked = asked_of(rows, tmp_path)
    evaluate(asked, Endpoint(server.url, "m"), SAMPLING, tmp_path / "results")
    names = [item.image_names for item in asked.items]
    contents = {file.name: file.read_bytes() for item in asked.items for file in item.images}
    evaluation = load_evaluation(tmp_path / "results")
    export_inspect(evaluation, log := tmp_path / "log.json")
    for sample, shown in zip(json.loads(log.read_text())["samples"], names, strict=True):
        [message] = sample["input"]
        if not shown:
            assert "<image>" not in message["content"]
            continue
        urls = [part["image"] for part in message["content"] if part["type"] == "image"]
        decoded = [base64.b64decode(url.partition("base64,")[2]) for url in urls]
        assert decoded == [contents[name] for name in shown]
    (tmp_path / "results/images" / names[0][0]).unlink()
    with pytest.raises(ResultsError, match=r"1 of 2 pictures of the evaluation are missing"):
        export_inspect(evaluation, tmp_path / "other")


def test_geometry3k_is_asked_as_published(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    content = write_picture(tmp_path / "x.png").read_bytes()
    found: list[dict[str, Any]] = [
        {
            "images": [{"bytes": content, "path": None}],
            "problem": f"<image>Find {n}.",
            "answer": str(n),
        }
        for n in range(601)
    ]
    pq.write_table(pa.Table.from_pylist(found), tmp_path / "test.parquet")
    asked = load_set(tmp_path / "test.parquet", "geometry3k", pictures=tmp_path)
    assert (len(asked.items), asked.grader, asked.template.name) == (601, "geometry", "geo3k")
    assert asked.items[7].prompt[0]["content"] == (  # type: ignore[index]
        "<image>Find 7. You FIRST think about the reasoning process as an internal monologue and "
        "then provide the final answer. The reasoning process MUST BE enclosed within <think> "
        "</think> tags. The final answer MUST BE put in \\boxed{}."
    )
    assert [file.read_bytes() for file in asked.items[7].images] == [content]
