"""Files of problems from URLs and hubs, against a hub of this machine: cached by commit, verified, refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from eval.problems import ProblemsError
from eval.problems.registry import load_set
from eval.problems.sources import fetch
from flows.config import Config, load_config
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.chain import prepare_data
from tasks.references import forget_resolved
from tasks.runs.plan import plan_chain
from tasks.runs.run import Run
from tests.hub_server import HubServer, sha256
from tests.hubs import hub_of_this_machine

BODY = b'{"problem": "1 + 1 = ?", "answer": "2"}\n' * 50
ROWS = b"".join(b'{"problem": "%d + 1 = ?", "answer": "%d"}\n' % (n, n + 1) for n in range(40))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with hub_of_this_machine(tmp_path) as server:
        yield server


def files(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock")


def test_a_url_is_downloaded_once_and_verified_again(hub: HubServer, tmp_path: Path) -> None:
    hub.plain["/data/math 500.jsonl"] = BODY
    source = f"{hub.url}/data/math%20500.jsonl?raw=1#sha256={sha256(BODY)}"
    path = fetch(source, tmp_path / "cache")
    assert (path.name, path.read_bytes()) == ("math 500.jsonl", BODY)
    hub.asked.clear()
    assert fetch(source, tmp_path / "cache") == path
    assert hub.asked == []
    path.write_bytes(b"tampered with")
    assert fetch(source, tmp_path / "cache").read_bytes() == BODY
    assert files(tmp_path / "cache") == ["math 500.jsonl"]


@pytest.mark.parametrize("end", ["", "#sha256=", "#sha256=" + "g" * 64, "#md5=" + "0" * 32])
def test_a_url_without_a_digest_is_refused_before_anything_is_asked(
    hub: HubServer, tmp_path: Path, end: str
) -> None:
    with pytest.raises(ProblemsError, match="is not pinned: end it in #sha256="):
        fetch(f"{hub.url}/math.jsonl{end}", tmp_path)
    assert hub.asked == []


def test_another_content_is_refused_with_both_digests_and_not_kept(hub: HubServer, tmp_path: Path) -> None:
    hub.plain["/math.jsonl"] = BODY
    named = sha256(b"what was meant")
    found = rf"its sha256 is {sha256(BODY)} \({len(BODY)} bytes\), not sha256 {named}"
    with pytest.raises(ProblemsError, match=found):
        fetch(f"{hub.url}/math.jsonl#sha256={named}", tmp_path / "cache")
    assert files(tmp_path / "cache") == []


def test_a_path_stands_for_itself(tmp_path: Path) -> None:
    (tmp_path / "math.jsonl").write_bytes(BODY)
    with pytest.raises(ProblemsError, match="1 problems, but math500 has exactly 500"):
        load_set(tmp_path / "math.jsonl", "math500")
    with pytest.raises(ProblemsError, match="no evaluation set is named"):
        load_set(None)


@pytest.mark.parametrize("scheme", ["hf", "modelscope"])
def test_a_dataset_of_a_hub_is_cached_by_its_commit(hub: HubServer, tmp_path: Path, scheme: str) -> None:
    repo = hub.dataset()
    listed = {"README.md": b"card", "list.json": b"{}", "data/a.jsonl": BODY, "data/b.jsonl": BODY}
    repo.commit(listed)
    path = fetch(f"{scheme}:org/rows/data/a.jsonl#sha256={sha256(BODY)}", tmp_path / "cache")
    assert path.read_bytes() == BODY
    folder = fetch(f"{scheme}:org/rows", tmp_path / "cache")
    assert files(folder) == ["a.jsonl", "b.jsonl"]  # of one format
    repo.commit({**listed, "data/a.jsonl": ROWS})
    assert fetch(f"{scheme}:org/rows/data/a.jsonl", tmp_path / "cache").read_bytes() == ROWS
    assert path.read_bytes() == BODY
    with pytest.raises(ProblemsError, match=rf"a\.jsonl of org/rows has sha256 .*not {'0' * 64}|is not the file"):
        fetch(f"{scheme}:org/rows/data/a.jsonl#sha256={'0' * 64}", tmp_path / "cache")
    with pytest.raises(ProblemsError, match=r"has no file data/aa\.jsonl \(did you mean data/a\.jsonl"):
        fetch(f"{scheme}:org/rows/data/aa.jsonl", tmp_path / "cache")
    with pytest.raises(ProblemsError, match="is not of the form hf:ORG/NAME"):
        fetch(f"{scheme}:rows", tmp_path / "cache")


def recipe(folder: Path) -> Config:
    data = ("data.train=hf:org/rows@main/train.jsonl", "data.eval=hf:org/rows@main/test.jsonl")
    columns = ("data.columns.problem=problem", "data.columns.answer=answer", "evaluate.benchmark=null")
    return load_config(
        PROJECT_ROOT / "configs" / "arith_cpu.yaml", [*data, *columns, f"store.path={folder / 'store'}"]
    )


def test_the_data_of_a_recipe_are_of_one_commit(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    repo = hub.dataset()
    lines = ROWS.splitlines(keepends=True)
    commit = repo.commit({"train.jsonl": b"".join(lines[:30]), "test.jsonl": b"".join(lines[30:])})
    config = recipe(tmp_path)
    with Run.start(config, "prepare-data") as run:
        first = prepare_data.fn(run).result()
    inputs = first.manifest()["inputs"]
    assert inputs["commit of hf:org/rows@main/train.jsonl"] == commit
    hub.interfere = lambda handler: handler.refuse(503) is None
    with Run.start(config, "prepare-data") as run:
        assert prepare_data.fn(run).result() == first
    hub.interfere = lambda handler: False
    repo.commit({"train.jsonl": b"".join(lines[:29]), "test.jsonl": b"".join(lines[30:])})
    forget_resolved()
    plan = plan_chain(config)[0]
    assert plan.state == "stale"
    assert "input commit of hf:org/rows@main/train.jsonl changed" in plan.changes
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    forget_resolved()
    other = config.model_copy(update={"store": config.store.model_copy(update={"path": str(tmp_path / "new")})})
    plan = plan_chain(other)[0]
    assert (plan.state, plan.key) == ("runs", None)
    assert "cannot be resolved now: HF_HUB_OFFLINE is set" in plan.note
    assert os.listdir(tmp_path / "cache/dapo") == ["hf"]
