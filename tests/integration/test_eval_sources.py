"""Problem files from URLs and a local hub: downloaded once, verified, and selected by split."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from downloads import DownloadError
from eval.problems import ProblemsError
from eval.problems.evaluation_sets import load_set
from eval.problems.files import files_of
from eval.problems.registry import SETS, SUITES
from eval.problems.sources import fetch, rows_of
from eval.results.rows import load_evaluation
from eval.results.suite import read_suite
from flows.cli import app
from tasks.artifacts.artifact import Artifact
from tasks.artifacts.references import forget_resolved
from tasks.artifacts.store import ArtifactStore
from tasks.data.prepare import build_dataset
from tasks.links import link_of
from tasks.runs.plan import plan_chain
from tests.configs import make_config
from tests.hub_server import HubServer, sha256
from tests.integration.arithmetic_server import running

BODY = b'{"problem": "1 + 1 = ?", "answer": "2"}\n' * 50
OTHER = BODY.replace(b"2", b"3")


def test_a_file_is_downloaded_once_and_verified_again(hub: HubServer, tmp_path: Path) -> None:
    hub.plain["/data/math 500.jsonl"] = BODY
    source = f"{hub.url}/data/math%20500.jsonl#sha256={sha256(BODY)}"
    path = fetch(source, tmp_path / "cache")
    assert (path.name, path.read_bytes()) == ("math 500.jsonl", BODY)
    num_asked = len(hub.asked)
    assert fetch(source, tmp_path / "cache") == path
    assert len(hub.asked) == num_asked
    path.write_bytes(b"tampered with")
    assert fetch(source, tmp_path / "cache").read_bytes() == BODY
    with pytest.raises(DownloadError, match="is not pinned"):
        fetch(f"{hub.url}/data/math.jsonl")
    with pytest.raises(DownloadError, match="not the expected file"):
        fetch(f"{hub.url}/data/math%20500.jsonl#sha256={sha256(OTHER)}", tmp_path / "cache")


@pytest.mark.parametrize("scheme", ["hf", "modelscope"])
def test_only_the_files_of_a_split_are_taken_from_a_repository(
    hub: HubServer, tmp_path: Path, scheme: str
) -> None:
    files = {
        "README.md": b"#",
        "data/train-0.jsonl": BODY,
        "data/train-1.jsonl": BODY,
        "data/test.jsonl": OTHER,
    }
    repo = hub.dataset("org/rows")
    repo.commit(files)
    assert fetch(f"{scheme}:org/rows", tmp_path / "cache").read_bytes() == OTHER
    folder = fetch(f"{scheme}:org/rows", tmp_path / "cache", "train")
    assert [file.name for file in files_of(folder, "train")] == ["train-0.jsonl", "train-1.jsonl"]
    before = rows_of(f"{scheme}:org/rows", "test").commit
    repo.commit({**files, "data/test.jsonl": BODY})
    assert rows_of(f"{scheme}:org/rows", "test").commit != before
    with pytest.raises(DownloadError, match="has no file"):
        fetch(f"{scheme}:org/rows/data/absent.jsonl", tmp_path / "cache")
    repo.commit({"train.csv": BODY, "b.jsonl": BODY, "c.csv": BODY})
    with pytest.raises(ProblemsError, match=r"several formats: name one of its files.*b\.jsonl"):
        rows_of(f"{scheme}:org/rows", "test")
    repo.commit({"train.csv": BODY, "dev.csv": BODY})
    with pytest.raises(ProblemsError, match="has no rows to evaluate with: name one of its files"):
        rows_of(f"{scheme}:org/rows", "test")


def test_missing_sets_are_refused() -> None:
    with pytest.raises(ProblemsError, match="choice has no rows to evaluate with; name a file"):
        load_set(None, "choice")
    with pytest.raises(ProblemsError, match="no evaluation set is named"):
        load_set(None)


def test_a_recipe_prepares_data_from_hubs_and_continues_offline(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moved branch makes a new artifact, an unchanged one is a hit, a cached one needs no hub."""
    repo = hub.dataset("org/rows")
    rows = {
        "data/train.jsonl": BODY,
        "data/test.jsonl": b'{"problem": "2 + 2 = ?", "answer": "4"}\n',
    }
    repo.commit(rows)
    places: dict[str, Any] = {
        "store": {"path": str(tmp_path / "store")},
        "model": {"source": "recipe"},
    }
    config = make_config(data={"train": "hf:org/rows", "eval": "hf:org/rows"}, **places)
    store = ArtifactStore(config.store.path)

    def prepared() -> tuple[Artifact, bool]:
        forget_resolved()
        return store.produce(
            link_of(config, "prepare_data").key(), lambda folder: build_dataset(config, folder)
        )

    first, _ = prepared()
    assert first.manifest()["metrics"]["train_rows"] == 1
    num_asked = len(hub.contents())
    assert prepared() == (first, True)
    assert len(hub.contents()) == num_asked
    repo.commit({**rows, "data/train.jsonl": OTHER})
    assert prepared()[0].key != first.key
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert prepared()[1]
    other = make_config(data={"train": "hf:org/other", "eval": "gsm8k"}, **places)
    forget_resolved()
    note = plan_chain(other)[0].note
    assert "would fetch hf:org/other, which cannot be resolved now: HF_HUB_OFFLINE is set" in note
    assert "fetches https://raw.githubusercontent.com/openai/grade-school-math/" in note


def published(name: str, count: int) -> bytes:
    """Sums in the columns of a set's published file."""
    rows: list[dict[str, Any]] = []
    for number in range(count):
        problem, answer = f"{number} + 1 = ?", str(number + 1)
        if name == "olympiadbench":
            rows.append({"question": problem, "context": None, "final_answer": [f"${answer}$"]})
        elif name in ("math500", "minerva"):
            rows.append({"problem": problem, "solution": f"So it is $\\boxed{{{answer}}}$."})
        else:
            rows.append({"problem": problem, "answer": answer})
    return b"".join(
        json.dumps({"id": f"{name}-{n}", **row}).encode() + b"\n" for n, row in enumerate(rows)
    )


def test_a_suite_is_downloaded_and_evaluated(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--suite math` with an empty cache: AIME 2025 comes from a hub, the others from URLs."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hub.dataset("math-ai/aime25").commit({"README.md": b"#", "test.jsonl": published("aime25", 30)})
    for name in set(SUITES["math"]) - {"aime25"}:
        body = published(name, 3)
        hub.plain[f"/{name}/test.jsonl"] = body
        here = {"url": f"{hub.url}/{name}/test.jsonl#sha256={sha256(body)}"}
        monkeypatch.setitem(SETS, name, replace(SETS[name], test=here, num_items=3))
    folders = tmp_path / "first", tmp_path / "second"
    with running() as server:
        for folder in folders:
            words = ["eval", "--base-url", server.url, "--model-name", "m", "--suite", "math"]
            done = CliRunner().invoke(app, [*words, "--output", str(folder)])
            assert done.exit_code == 0, done.output
    for folder in folders:
        right = {
            name: [row.is_right for row in load_evaluation(path).rows]
            for name, path in read_suite(folder).items()
        }
        assert list(right) == list(SUITES["math"])
        assert right == {name: [True] * (30 if name == "aime25" else 3) for name in right}
    files = [asked.path for asked in hub.contents() if asked.path.endswith(".jsonl")]
    assert len(files) == len(set(files)) == 6, "a file was downloaded twice"
