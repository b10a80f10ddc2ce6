"""An exported run: a folder that transformers loads, with a card of the measured results."""

import concurrent.futures
import contextlib
import hashlib
import html
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dapo_core.errors import ConfigError
from eval.report.item_pages import PackedItems
from eval.report.plots import Plots
from eval.report.report import render_html
from flows.cli import app
from flows.config import load_config
from tasks.artifacts.artifact import FileEntry, StoreError, content_digest, sha256_of
from tasks.runs.collect_garbage import collect_garbage
from tasks.runs.export_run import base_model_of, export_run, model_card
from tasks.runs.history import RecordedRun, find_run, read_report
from tests.configs import make_config
from tests.recorded_runs import Outcome, record_run, small_config

SECRET = "https://hooks.example.org/secret"
KEY = "sk-4f8a1c93d2e7"  # in the environment when the run is exported


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """A run with a model, a difference that 4 items cannot prove, and many local paths."""
    folder = tmp_path_factory.mktemp("a & b") / "store"
    files = ("--chat-template", f"{Path.home()}/t.jinja", "--config", f"{Path.home()}.yaml", KEY)
    config = small_config(
        folder, f"flow.webhook.url={SECRET}", f"serve.extra_args={json.dumps(files)}"
    )
    recorded = record_run(config, Outcome())
    run = find_run(recorded.store.root, recorded.folder.name)
    report = read_report(run)
    assert report is not None
    no_plots: Plots = {
        name: [""] for name in ("accuracy", "gain", "transition", "length", "limit", "training")
    }
    (run.folder / "report" / "report.html").write_text(
        render_html(report, no_plots, PackedItems(0, "", []))
    )
    return run


@pytest.fixture(scope="module")
def exported(run: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "new" / "model"
    command = ["export", run.id, str(folder), "--store", str(run.folder.parent.parent)]
    done = CliRunner().invoke(app, command, env={"VLLM_API_KEY": KEY}, catch_exceptions=False)
    assert done.exit_code == 0
    assert re.search(
        rf"model of run {run.id}, [\d,]+ bytes, every file's digest verified", done.stdout
    )
    return folder


def ignore(done: int, total: int) -> None:
    """Show no progress."""


def test_an_export_copies_model_report_manifests_and_configuration(
    run: RecordedRun, exported: Path
) -> None:
    weights = exported / "weights"  # a merge's test has transformers load what it wrote
    original = Path(run.stages["merge_checkpoint"].artifact) / "weights"
    assert not os.path.samefile(weights, original)
    assert (weights.stat().st_nlink, sha256_of(weights)) == (1, sha256_of(original))
    assert not (exported / "manifest.json").exists()  # it is no artifact
    assert {path.name for path in (exported / "report").iterdir()} == {
        "report.json",
        "report.md",
        "report.html",
    }
    assert {path.stem for path in (exported / "manifests").iterdir()} == set(run.stages)
    manifest = json.loads((exported / "manifests" / "train_policy.json").read_text())
    assert manifest["digest"] == run.stages["train_policy"].digest
    config = yaml.safe_load((exported / "config.yaml").read_text())
    assert config["train"]["total_steps"] == 60
    assert config["store"]["path"] == ".dapo"  # not where it was made
    assert "host" not in manifest
    assert all(
        SECRET not in path.read_text(errors="replace")
        for path in exported.rglob("*")
        if path.is_file()
    )
    assert [path.name for path in exported.parent.iterdir()] == ["model"]


def test_exported_files_contain_no_local_paths_or_secrets(run: RecordedRun, exported: Path) -> None:
    store = run.folder.parent.parent
    texts = {path.name: path.read_text() for path in exported.rglob("*") if path.suffix}
    assert {
        "config.yaml",
        "README.md",
        "report.html",
        "report.json",
        "report.md",
        "train_policy.json",
    } <= set(texts)
    places = {str(store), html.escape(str(store)), f"{Path.home()}/"}
    assert {name for name, text in texts.items() if any(place in text for place in places)} == set()
    stage = run.stages["merge_checkpoint"]
    place = f"${{STORE}}/{stage.place}"
    assert json.loads(texts["report.json"])["artifacts"]["merge_checkpoint"] == place
    assert place in texts["report.md"]
    assert place in texts["report.html"]
    words = ["--chat-template", "${HOME}/t.jinja", "--config", f"{Path.home()}.yaml", "[redacted]"]
    assert json.loads(texts["evaluate_after.json"])["config"]["serve"]["extra_args"] == words
    assert yaml.safe_load(texts["config.yaml"])["serve"]["extra_args"] == words
    assert "`${STORE}` and `${HOME}` stand for" in texts["README.md"]
    with pytest.raises(ConfigError, match=r"serve\.extra_args\.1 = .*still holds a placeholder"):
        load_config(exported / "config.yaml")


def test_the_card_contains_the_measured_results(run: RecordedRun, exported: Path) -> None:
    card = (exported / "README.md").read_text()
    _, header, body = card.split("---\n", 2)
    about = yaml.safe_load(header)
    assert about["library_name"] == "transformers"
    assert "dapo" in about["tags"]
    assert "base_model" not in about  # built from a recipe
    assert "model-index" not in about  # of problems that have no name on the Hub
    flat = " ".join(body.split())
    assert "**No significant change in accuracy: 25.0 % before, 75.0 % after, +50.0 points" in flat
    assert "Exact McNemar: p = 0.5 over the 4 items" in flat
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in body.splitlines()
        if line[:1] == "|"
    ]
    cells = {row[0]: row[1:] for row in rows}
    assert cells["accuracy"] == ["25.0 %", "75.0 %", "+50.0"]
    report = json.loads((exported / "report" / "report.json").read_text())
    low, high = (100 * bound for bound in report["after"]["interval"])
    assert cells["95 % interval"][1] == f"{low:.1f} to {high:.1f}"
    assert cells["benchmark"] == ["generated problems"]
    assert cells["grader"] == [report["settings"]["grader"]]
    assert cells["clip range"] == ["-0.2, +0.28", "ratio"]
    assert cells["prompts per training step"] == ["16", "prompts"]
    assert cells["optimizer steps"] == ["120", "steps"]  # 60 x 16 / 8
    recipe = body.partition("## Recipe")[2].partition("##")[0]
    names = [line.split("|")[1].strip() for line in recipe.splitlines() if line[:1] == "|"]
    assert len(names) == len(set(names)) == 2 + 8  # no two rows have the same name
    assert cells["torch"] == [
        json.loads((exported / "manifests" / "train_policy.json").read_text())["versions"]["torch"]
    ]
    data = json.loads((exported / "manifests" / "prepare_data.json").read_text())
    for file in data["files"]:
        rows = {"train.parquet": "32 rows, ", "eval.parquet": "8 rows, "}.get(file["path"], "")
        assert f"`{file['path']}`: {rows}sha256 `{file['sha256']}`" in body
    assert "1 step took 2.5 s; 900 response tokens were trained on out of 1,200 generated." in flat


def test_the_card_has_a_score_per_registered_set(run: RecordedRun) -> None:
    report = read_report(run)
    assert report is not None
    report["settings"]["benchmark"] = "math500"
    card = model_card(run, load_config(run.folder / "config.yaml"), report, {})
    [result] = yaml.safe_load(card.split("---\n", 2)[1])["model-index"][0]["results"]
    assert (result["dataset"], result["metrics"][0]["value"]) == (
        {"name": "math500", "type": "math500"},
        0.75,
    )
    report |= {
        "headline": "mine",
        "benchmarks": [
            {"name": "mine", "after": 0.5, "num_samples": 1},
            {"name": "aime", "after": 0.25, "num_samples": 16},
        ],
    }
    config = load_config(run.folder / "config.yaml")
    benchmarks = ["own/mine.csv", {"set": "aime24", "name": "aime", "num_samples": 16}]
    evaluate = type(config.evaluate).model_validate({"benchmarks": benchmarks})
    card = model_card(run, config.model_copy(update={"evaluate": evaluate}), report, {})
    [result] = yaml.safe_load(card.split("---\n", 2)[1])["model-index"][0]["results"]
    assert (result["dataset"], result["metrics"]) == (
        {"name": "aime", "type": "aime24"},
        [{"type": "accuracy", "value": 0.25, "name": "accuracy (avg@16)"}],
    )
    assert [line.split("|")[2].strip() for line in card.splitlines() if "| benchmark " in line] == [
        "mine"
    ]


def test_a_failed_export_leaves_no_files(run: RecordedRun, tmp_path: Path) -> None:
    model = tmp_path / "model"

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_run(run, model, interrupt)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        StoreError, match="model was created meanwhile, perhaps by another export; name a new"
    ):
        export_run(run, model, lambda *_: (model / "mine").mkdir(parents=True, exist_ok=True))
    with pytest.raises(StoreError, match="model already exists; name a new folder"):
        export_run(run, model, ignore)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "mine"]


@pytest.mark.slow
def test_garbage_collection_waits_for_an_export(tmp_path: Path) -> None:
    old = record_run(small_config(tmp_path / "store"), Outcome(weights="old"))
    record_run(small_config(tmp_path / "store", "run.seed=5"), Outcome(weights="new"))
    run = find_run(old.store.root, old.folder.name)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        collections, progress = [], []

        def collect(done: int, total: int) -> None:
            progress.append((done, total))
            collections.append(pool.submit(collect_garbage, old.store.root, 1, margin_seconds=0.0))
            with pytest.raises(concurrent.futures.TimeoutError):
                collections[0].result(timeout=0.3)

        num_bytes = export_run(run, tmp_path / "model", collect)
        assert progress[-1] == (num_bytes, num_bytes)
        gone = {
            str(item.attempt.path)
            for item in collections[0].result(timeout=300)
            if not item.kept_reason
        }
    assert run.stages["merge_checkpoint"].artifact in gone
    assert (num_bytes, (tmp_path / "model" / "weights").read_text()) == (3, "old")


def test_an_unwritable_destination_or_missing_configuration_is_reported(
    run: RecordedRun, tmp_path: Path
) -> None:
    with pytest.raises(StoreError, match="/proc/no/where cannot be created: "):
        export_run(run, Path("/proc/no/where"), ignore)
    recorded = record_run(small_config(tmp_path / "store"))
    recorded.config_path.unlink()
    seen: list[int] = []
    with pytest.raises(ConfigError, match=r"config\.yaml cannot be read"):
        export_run(
            find_run(recorded.store.root, "latest"),
            tmp_path / "model",
            lambda done, total: seen.append(done),
        )
    assert seen == []


def test_a_damaged_model_is_not_exported(tmp_path: Path) -> None:
    recorded = record_run(small_config(tmp_path / "store"))
    run = find_run(recorded.store.root, "latest")
    weights = Path(run.stages["merge_checkpoint"].artifact) / "weights"
    weights.write_text("trainee")  # as long as "trained"
    with pytest.raises(
        StoreError, match=r"weights has sha256:\w{64}, its manifest says .* damaged"
    ):
        export_run(run, tmp_path / "model", ignore)
    assert not (tmp_path / "model").exists()
    weights.parent.rename(tmp_path / "elsewhere")
    with pytest.raises(
        StoreError, match=r"merge_checkpoint of the run .* is no longer in the store"
    ):
        export_run(run, tmp_path / "model", ignore)


def test_a_run_without_a_model_cannot_be_exported(tmp_path: Path) -> None:
    recorded = record_run(
        small_config(tmp_path / "store"), labels=("prepare_data",), flow="prepare-data"
    )
    with pytest.raises(
        StoreError, match=r"\(prepare-data, completed\) has no merge_checkpoint, only prepare_data"
    ):
        export_run(find_run(recorded.store.root, "latest"), tmp_path / "model", ignore)


def republished(run: RecordedRun, folder: Path, files: Mapping[str, str]) -> RecordedRun:
    """The run with extra files in its merged model, listed in the manifest."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name, content in files.items():
        with contextlib.suppress(OSError):
            (folder / name).write_text(content)
        entry = {
            "path": name,
            "size": len(content),
            "sha256": hashlib.sha256(content.encode()).hexdigest(),
        }
        manifest["files"].append(entry)
    old = manifest["digest"]
    manifest["digest"] = content_digest([FileEntry.from_row(row) for row in manifest["files"]])
    (folder / "manifest.json").write_text(json.dumps(manifest))
    record = run.folder / "run.json"
    record.write_text(record.read_text().replace(old, manifest["digest"]))
    return find_run(run.store, run.id)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["../../../../outside", "{}/outside", "link"])
def test_no_file_outside_the_artifact_is_read_or_written(tmp_path: Path, name: str) -> None:
    """A manipulated manifest or link, in a store that others can write."""
    recorded = record_run(small_config(tmp_path / "store"))
    run = find_run(recorded.store.root, "latest")
    merged = Path(run.stages["merge_checkpoint"].artifact)
    outside = tmp_path / "outside"
    outside.write_text("private")
    if name == "link":
        (merged / "link").symlink_to(outside)
    run = republished(run, merged, {name.format(tmp_path): "private"})
    with pytest.raises(
        StoreError, match=r"is damaged: .*(outside is missing|link is neither a file)"
    ):
        export_run(run, tmp_path / "a" / "b" / "c" / "d" / "model", ignore)
    assert not (tmp_path / "a" / "b" / "c" / "d" / "model").exists()
    assert outside.read_text() == "private"


@pytest.mark.slow
@pytest.mark.parametrize("key", ["settings", "before"])
def test_an_incomplete_report_is_reported(tmp_path: Path, key: str) -> None:
    recorded = record_run(small_config(tmp_path / "store"))
    run = find_run(recorded.store.root, "latest")
    report = run.folder / "report" / "report.json"
    report.write_text(
        json.dumps({name: value for name, value in read_report(run).items() if name != key})
    )
    said = rf"report\.json is incomplete \(.*{key}.*\); dapo stage compare \S+ writes it"
    with pytest.raises(StoreError, match=said):
        export_run(run, tmp_path / "model", ignore)


def test_manipulated_records_and_reports_are_refused(tmp_path: Path) -> None:
    recorded = record_run(small_config(tmp_path / "store"))
    run = find_run(recorded.store.root, "latest")
    page = run.folder / "report" / "report.html"
    page.symlink_to("/etc/hostname")
    with pytest.raises(
        StoreError, match=r"report\.html is a link; dapo stage compare .* writes the report again"
    ):
        export_run(run, tmp_path / "model", ignore)
    page.unlink()
    page.write_bytes(b"\xff")
    with pytest.raises(StoreError, match=r"report\.html cannot be read: .*codec can't decode"):
        export_run(run, tmp_path / "model", ignore)
    record = run.folder / "run.json"
    text = record.read_text()
    place = run.stages["merge_checkpoint"].artifact
    for planted in (
        text.replace(place, f"{tmp_path}/../../etc"),
        text.replace('"fetch_model"', '"../../../x"'),
    ):
        record.write_text(planted)
        with pytest.raises(StoreError, match=r"run\.json is not a valid run record"):
            find_run(run.store, run.id)


def test_the_base_model_card_is_kept(tmp_path: Path) -> None:
    recorded = record_run(small_config(tmp_path / "store"))
    run = find_run(recorded.store.root, "latest")
    run = republished(
        run, Path(run.stages["merge_checkpoint"].artifact), {"README.md": "the base model's"}
    )
    export_run(run, tmp_path / "model", ignore)
    assert (tmp_path / "model" / "BASE_MODEL_README.md").read_text() == "the base model's"
    assert "arith_cpu" in (tmp_path / "model" / "README.md").read_text()


@pytest.mark.parametrize(
    ("folder", "name", "expected"),
    [
        ("models--Qwen--Qwen3-0.6B/snapshots/abc", None, "Qwen/Qwen3-0.6B"),
        ("local", None, None),
        ("local", "org/name-1.5B", "org/name-1.5B"),
        ("local", "/some/where", None),
        ("local", "name", None),
    ],
)
def test_the_base_model_name_is_taken_from_its_folder(
    tmp_path: Path, folder: str, name: str | None, expected: str | None
) -> None:
    (model := tmp_path / folder).mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"_name_or_path": name} if name else {}))
    assert base_model_of(make_config(model)) == expected
    assert base_model_of(make_config(tmp_path / "gone")) is None
    assert (
        base_model_of(make_config(model={"source": "huggingface", "id": "Qwen/Qwen3-8B"}))
        == "Qwen/Qwen3-8B"
    )
