"""Running the chain through server and worker: a power failure in the middle, the Prefect UI,
reruns.

One scenario whose steps are fixtures, with a small real chain: a training, a merge, two servers.
"""

import functools
import json
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.small_chain import SMALL
from tests.integration.browser import Browser
from tests.operated import ROOT, Site, describe

STAGES = [
    "prepare_data",
    "fetch_model",
    "evaluate_before",
    "train_policy",
    "merge_checkpoint",
    "evaluate_after",
]
SLOW_EVALUATION = "evaluate.requests_per_second=1"  # changes no result, so no key
OVERRIDES = (*SMALL, "train.total_steps=8", "checkpoint.save_every=1")
NUM_STEPS, NUM_ITEMS = 8, 24
CHAIN_SECONDS = 500.0
pytestmark = pytest.mark.timeout(1500)  # on two busy cores


@dataclass(frozen=True)
class PowerCut:
    """The state when every process died at once."""

    flow_runs: tuple[str, str]  # the chain, evaluating its first model; the train-policy deployment
    answers: list[str]  # lines of results.jsonl
    steps: list[str]  # lines of metrics.jsonl


@dataclass(frozen=True)
class Finished:
    """A completed flow run and its record."""

    flow_run: str
    folder: Path
    record: dict[str, Any]

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.folder / "report" / "report.json").read_text())

    @property
    def cached(self) -> dict[str, bool]:
        return {label: stage["cached"] for label, stage in self.record["stages"].items()}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"), OVERRIDES)
    try:
        site.up()
        yield site
        site.down()
    finally:
        site.end_everything()


@pytest.fixture(scope="module")
def power_cut(site: Site) -> PowerCut:
    """SIGKILL everything during an evaluation with answers and a training with a checkpoint."""
    chain = site.run_deployment("dapo-full", SLOW_EVALUATION)
    site.wait_for("the model", lambda: [*site.store.glob("fetch_model/*/1")], CHAIN_SECONDS)
    training = site.create_run("train-policy")

    def pause(flow_run: str, is_far_enough: bool) -> bool:
        """Pause a run that is far enough, so that it cannot finish before the other one is."""
        process = site.flow_process(flow_run)
        assert process is not None, site.run_state(flow_run)
        if is_far_enough:
            for each in [process, *process.children(recursive=True)]:
                each.send_signal(signal.SIGSTOP)
        return is_far_enough

    def are_both_paused() -> bool:
        if not paused[chain]:
            num_answers = len(lines_in(site.store, "evaluate_model/*/*.partial/results.jsonl"))
            paused[chain] = pause(chain, num_answers >= 5)
        if not paused[training]:
            saved = site.store.glob("train_policy/*/*.partial/checkpoints/step_000002")
            paused[training] = pause(training, any(saved))
        return all(paused.values())

    paused = {chain: False, training: False}
    for flow_run in paused:
        started = functools.partial(site.flow_process, flow_run)
        site.wait_for("the run's process", started, CHAIN_SECONDS)
    site.wait_for("an evaluation and a training in progress", are_both_paused, CHAIN_SECONDS)
    assert len(site.end_everything()) > 10
    answers = lines_in(site.store, "evaluate_model/*/*.partial/results.jsonl")
    steps = lines_in(site.store, "train_policy/*/*.partial/metrics.jsonl")
    assert 5 <= len(answers) < NUM_ITEMS
    site.up()
    return PowerCut((chain, training), answers, steps)


@pytest.fixture(scope="module")
def chain(site: Site, power_cut: PowerCut) -> Finished:
    """Run the whole chain again."""
    return completed(site, site.create_run("dapo-full"))


def completed(site: Site, flow_run: str) -> Finished:
    state = site.wait_until_final(flow_run, CHAIN_SECONDS)
    assert state["type"] == "COMPLETED", (state, site.log_messages(flow_run)[-30:])
    folder = max((site.store / "runs").iterdir())
    return Finished(flow_run, folder, json.loads((folder / "run.json").read_text()))


def lines_in(store: Path, pattern: str) -> list[str]:
    return [
        line for path in store.glob(pattern) for line in path.read_text().splitlines(keepends=True)
    ]


def test_training_resumes_from_its_checkpoint_after_a_power_failure(
    power_cut: PowerCut, chain: Finished
) -> None:
    steps = lines_in(chain.folder, "train_policy/metrics.jsonl")
    assert [json.loads(line)["step"] for line in steps] == [*range(1, NUM_STEPS + 1)]
    kept = [line for line in power_cut.steps if json.loads(line)["step"] <= 2]
    assert len(kept) == 2
    assert steps[:2] == kept  # byte for byte: not repeated


def test_answered_items_are_not_asked_again_after_a_power_failure(
    power_cut: PowerCut, chain: Finished
) -> None:
    answers = lines_in(chain.folder, "evaluate_before/results.jsonl")
    assert len(answers) == NUM_ITEMS
    assert set(power_cut.answers) <= set(answers)  # including timestamps
    assert chain.cached == {label: label in ("prepare_data", "fetch_model") for label in STAGES}


def test_runs_that_died_with_the_machine_become_crashed(
    site: Site, power_cut: PowerCut, chain: Finished
) -> None:
    for flow_run in power_cut.flow_runs:
        state = site.wait_until_final(flow_run, CHAIN_SECONDS)
        assert state["type"] == "CRASHED"
        assert "No heartbeat" in state["message"]


def test_the_run_folder_records_and_links_everything(chain: Finished) -> None:
    record = chain.record
    assert (record["id"], list(record["stages"])) == (chain.folder.name, STAGES)
    assert (record["state"], record["report"]["n"]) == ("completed", NUM_ITEMS)
    for label, stage in record["stages"].items():
        link = chain.folder / label
        assert link.is_symlink()
        assert str(link.resolve()) == stage["artifact"]
        assert json.loads((link / "manifest.json").read_text())["key"] == stage["key"]
    assert (chain.folder / "report" / "report.html").stat().st_size > 10_000
    before = (chain.folder / "fetch_model" / "model.safetensors").read_bytes()
    assert (chain.folder / "merge_checkpoint" / "model.safetensors").read_bytes() != before


def test_the_prefect_ui_shows_logs_tasks_and_the_report(site: Site, chain: Finished) -> None:
    page = f"{site.services.server.read()['page_url']}/runs/flow-run/{chain.flow_run}"
    name = site.ask("GET", f"/flow_runs/{chain.flow_run}")["name"]
    tasks = site.task_states(chain.flow_run)
    with Browser() as browser:
        browser.resize(1400, 3000)  # the UI does not load what is below the screen
        browser.open(page)
        for tab, words in {
            "logs": (name, "Completed", "dapo-full", "cached, built in "),
            "task-runs": (*tasks, "Completed", "Cached"),
            "artifacts": ("arith-cpu-report",),
        }.items():
            browser.wait_for(f"document.getElementById('{tab}') !== null")
            browser.evaluate(f"document.getElementById('{tab}').click()")
            for word in words:
                browser.wait_for(f"document.body.innerText.includes({json.dumps(word)})")
        assert all(
            url.startswith((site.services.server.read()["page_url"], "data:", "blob:"))
            for url in browser.requests
        )


def test_a_second_run_is_all_cached(site: Site, chain: Finished) -> None:
    again = completed(site, site.create_run("dapo-full"))
    assert again.cached == dict.fromkeys(STAGES, True)
    states = site.task_states(again.flow_run)
    # the report is always written
    assert sorted(states.values()) == ["Cached"] * len(STAGES) + ["Completed"]
    assert again.report["artifacts"] == chain.report["artifacts"]
    assert again.report["after"] == chain.report["after"]


def test_compare_writes_a_new_report_from_the_store(site: Site, chain: Finished) -> None:
    done = site.dapo(*site.chain("stage", "compare"))
    run = max((site.store / "runs").iterdir())
    record = json.loads((run / "run.json").read_text())
    assert (record["flow"], record["state"]) == ("compare", "completed")
    assert record["report"] == chain.record["report"]
    assert {stage["artifact"] for stage in record["stages"].values()} == set(
        chain.report["artifacts"].values()
    )
    assert f"Report with plots: {run / 'report' / 'report.html'}" in done.stdout.replace("\n", "")


def test_an_export_contains_no_path_of_this_machine(
    site: Site, chain: Finished, tmp_path: Path
) -> None:
    site.dapo("export", chain.folder.name, str(tmp_path / "model"))
    places = [f"{place}/".encode() for place in (site.store, ROOT, sys.prefix, Path.home())]
    files = [path for path in (tmp_path / "model").rglob("*") if path.is_file()]
    assert [
        path.name for path in files if any(place in path.read_bytes() for place in places)
    ] == []
    manifest = json.loads((tmp_path / "model" / "manifests" / "evaluate_after.json").read_text())
    command = manifest["metrics"]["serve_command"]
    assert " python -m dapo_core.engines.vllm_command serve MODEL --served-model-name " in command


def test_a_permanent_error_is_shown_once_and_not_retried(site: Site, chain: Finished) -> None:
    done = site.dapo(*site.chain("run", changes=("data.max_prompt_tokens=1",)), status=2)
    output = done.stdout + done.stderr
    assert output.count("prompts are longer than data.max_prompt_tokens=1") == 1
    assert done.stderr.startswith(
        "ChildProcessFailed: train_policy ended with exit code 2; its log is "
    )
    assert "retrying in" not in output
    assert "Traceback" not in output


def test_without_services_only_a_damaged_model_is_rebuilt(site: Site, chain: Finished) -> None:
    site.down()
    shutil.rmtree(site.store / ".services")  # Prefect's database
    weights = (chain.folder / "merge_checkpoint" / "model.safetensors").resolve()
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    done = site.dapo(*site.chain("run"))
    newest = max((site.store / "runs").iterdir())
    stages = json.loads((newest / "run.json").read_text())["stages"]
    # The same shards give the same bytes, so everything made from the model stays valid.
    assert {label: stage["cached"] for label, stage in stages.items()} == {
        label: label != "merge_checkpoint" for label in STAGES
    }
    assert (newest / "merge_checkpoint" / "model.safetensors").read_bytes() == good
    assert (weights.parent.with_suffix(".damaged") / "model.safetensors").read_bytes() != good
    lines = done.stdout.splitlines()
    assert sum(f"{'merge_checkpoint':<16} built in " in line for line in lines) == 1
    assert sum(" cached, built in " in line for line in lines) == len(STAGES) - 1
    assert "is damaged: model.safetensors" in done.stdout
    assert "Finished in state" not in done.stdout
    assert describe(site.processes()) == []
