"""A real `vllm serve` reads the pictures of an evaluation."""

from pathlib import Path

import pytest

from eval.endpoint import Sampling
from eval.problems.items import EvaluationSet, Item
from eval.results.rows import load_evaluation
from tasks.artifacts.artifact import sha256_of
from tasks.config.serve import ServeConfig
from tasks.serve_model.servers import serve_model
from tests.evaluations import evaluate
from tests.tiny_vision import build_tiny_vision, write_picture

pytest.importorskip("torchvision", reason="vLLM's models that read pictures import it")


def test_answers_depend_on_the_pictures(tmp_path: Path) -> None:
    """Two questions differ by their picture alone; a third has two of them."""
    written = [write_picture(tmp_path / f"{seed}.png", 64, 48, seed) for seed in range(2)]
    files = [file.rename(file.with_stem(sha256_of(file))) for file in written]
    shown = [files[:1], files[1:], files]
    items = tuple(
        Item(
            str(number),
            ({"role": "user", "content": "<image>" * len(images) + "1 + 1 ="},),
            "2",
            images=tuple(images),
        )
        for number, images in enumerate(shown)
    )
    settings = ServeConfig(
        dtype="float32", max_model_len=256, max_num_seqs=4, memory_gigabytes=0.1, eager=True
    )
    model = build_tiny_vision(tmp_path / "model")
    with serve_model(model, settings, tmp_path / "serve.log", "m", num_pictures=2) as server:
        output = tmp_path / "results"
        summary = evaluate(EvaluationSet(items), server, Sampling(max_tokens=12), output)
    assert summary.request_failed_rate == 0.0
    responses = [row.response for row in load_evaluation(output).rows]
    assert len({*responses}) == 3
    assert "torch.set_num_threads" not in (tmp_path / "serve.log").read_text()
