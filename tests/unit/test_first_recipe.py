"""`dapo init` writes the recipe of configs/ for small files, or refuses what it cannot identify."""

import csv
import json
import re
import socket
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from dapo_core.errors import ConfigError, DataError
from dapo_core.machine import device
from dapo_core.memory.devices import GIB, find_device
from eval.problems import ProblemsError
from flows.cli import app
from flows.config import Config, load_config
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.preflight.finding import FAIL, OK, WARN, Finding, Findings, PreflightError
from tasks.preflight.memory import check_memory
from tasks.preflight.run import examine
from tasks.recipes.first_data import data_set, parse_columns
from tasks.recipes.first_recipe import Machine, first_recipe, learning_rate, model_keys, named_size
from tests.tiny_models import build_tiny

CPU = Machine("cpu", 1, 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a CSV of questions and a model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    with (tmp_path / "data/questions.csv").open("w") as file:
        writer = csv.writer(file)
        writer.writerow(["Question", "Answer"])
        writer.writerows([f"What is {number} + {number}?", str(2 * number)] for number in range(40))
    build_tiny(tmp_path / "models/small", "llama")
    return tmp_path


def written(
    name: str, data: str = "data/questions.csv", held_out: str | None = None, **given: Any
) -> Config:
    """The configuration of a first recipe, written to NAME.yaml."""
    path, model = Path(f"{name}.yaml"), given.pop("model", model_keys("models/small"))
    path.write_text(first_recipe(path, model, data, held_out, given.pop("machine", CPU), **given))
    return load_config(path)


def statuses(config: Config) -> set[str]:
    return {finding.status for finding in examine(config)}


def test_init_writes_the_recipe_in_configs_and_its_plan_is_clean(folder: Path) -> None:
    assert statuses(written("own_cpu")) == {OK}
    text = Path("own_cpu.yaml").read_text()
    assert (PROJECT_ROOT / "configs/own_cpu.yaml").read_text() == text
    texts = [Path(f"own_cpu.{name}.jsonl").read_text() for name in ("train", "eval")]
    parts = [[json.loads(line) for line in text.splitlines()] for text in texts]
    assert [len(part) for part in parts] == [32, 8]
    questions = [{row["Question"] for row in part} for part in parts]
    assert questions[0].isdisjoint(questions[1])


def test_init_says_that_its_plan_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Findings([Finding("memory", FAIL, "95 of 61 GiB", "set train.offload")])
    monkeypatch.setattr("tasks.preflight.run.examine", lambda *_, **__: failed)
    words = ["init", "own.yaml", "--model", "models/small", "--data", "data/questions.csv"]
    said = CliRunner().invoke(app, words).output
    assert "wrote own.yaml for this machine, but its plan fails: memory, above." in said
    assert "next: " not in said


def test_local_files_and_models_need_no_network(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: asked.append(host) or [])
    examine(written("own"))
    assert asked == []


def test_a_base_model_needs_a_chat_template(folder: Path) -> None:
    template = Path("models/small/chat_template.jinja").rename("chat.jinja")
    with pytest.raises(
        PreflightError, match=r"has no chat template; .* \(dapo init: --chat-template\)"
    ):
        first_recipe(
            Path("b/c/b.yaml"), model_keys("models/small"), "data/questions.csv", None, CPU
        )
    # nothing of the recipe
    assert {path.name for path in Path().iterdir()} == {"data", "models", "chat.jinja"}
    config = written("b", model=model_keys("models/small", template))
    assert config.model.chat_template == "chat.jinja"
    assert statuses(config) == {OK}


def test_an_unknown_data_source_gets_the_default_scorer(folder: Path) -> None:
    rows = [
        {
            "data_source": "school-2026",
            "prompt": [
                {"role": "user", "content": f"What is {number} + {number}? Put it in \\boxed{{}}."}
            ],
            "reward_model": {"ground_truth": str(2 * number)},
        }
        for number in range(40)
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = written("s", "rows.jsonl")
    assert config.reward.scorers == ("school-2026=exact",)
    assert statuses(config) == {OK}


@pytest.mark.parametrize(
    ("kind", "devices", "ranks", "workers", "placement"),
    [("npu", 8, 4, 4, "separate"), ("cuda", 1, 1, 1, "colocated")],
)
def test_devices_are_split_between_ranks_and_engines(
    folder: Path, kind: str, devices: int, ranks: int, workers: int, placement: str
) -> None:
    config = written("r", held_out="arithmetic", machine=Machine(kind, devices, 64))
    assert (config.train.device, config.train.num_ranks, config.rollout.num_workers) == (
        kind,
        ranks,
        workers,
    )
    assert (config.train.placement, config.num_devices, config.serve.data_parallel) == (
        placement,
        devices,
        devices,
    )
    assert config.data.max_prompt_tokens + config.rollout.max_response_tokens <= 512


def test_the_layout_is_the_first_that_fits_the_devices(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die = find_device("Atlas 800T A3").num_bytes
    monkeypatch.setattr(device.Npu, "memory_bytes", lambda self: die)
    monkeypatch.setattr(device.Cpu, "memory_bytes", lambda self: 1500 * GIB)
    a3 = Machine("npu", 16, 64)

    def laid_out(size: str) -> Config:
        config = written(size, model=model_keys(f"Qwen/Qwen3-{size}"), machine=a3)
        check_memory(config, None, findings := Findings())
        assert [finding.status for finding in findings] == [OK]
        return config

    small = laid_out("8B")
    assert (small.train.placement, small.train.num_ranks, small.rollout.num_workers) == (
        "separate",
        8,
        8,
    )
    # 16 B x 32.8e9 = 488 GiB of state, which eight dies do not hold; engines of two dies have
    # room for few sequences beside 30.5 GiB of weights.
    large = laid_out("32B")
    assert (large.train.placement, large.train.num_ranks) == ("colocated", 16)
    assert (large.rollout.num_workers, large.rollout.tensor_parallel) == (4, 4)
    assert (large.serve.tensor_parallel, large.serve.data_parallel) == (2, 8)
    assert laid_out("30B-A3B").train.expert_parallel == 16
    with pytest.raises(
        ConfigError, match=r"16 devices of 61\.3 GiB.* host memory would hold .*128 devices on 8 "
    ):
        laid_out("235B-A22B")


def test_hub_ids_and_registered_names_are_accepted(folder: Path) -> None:
    assert model_keys("modelscope:Qwen/Qwen3-0.6B@main") == {
        "source": "modelscope",
        "id": "Qwen/Qwen3-0.6B",
        "revision": "main",
    }
    assert model_keys("Qwen/Qwen3-8B") == {"source": "huggingface", "id": "Qwen/Qwen3-8B"}
    assert data_set("gsm8k", "data") == "gsm8k"
    assert data_set("openai/gsm8k", "data") == "hf:openai/gsm8k"
    for bad, message in (
        ("nosuch", "is not a file or folder here"),
        ("a b/c", "is not a file or folder here"),
    ):
        with pytest.raises(ConfigError, match=message):
            data_set(bad, "data")
    with pytest.raises(ConfigError, match="neither a folder here nor a hub id"):
        model_keys("nosuch")


def test_a_registered_schema_is_recognized_but_a_part_does_not_use_its_name(folder: Path) -> None:
    rows = [{"question": f"How many? {n}", "answer": f"I count. #### {n}"} for n in range(20)]
    Path("g.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert data_set("g.jsonl", "data") == [{"set": "gsm8k", "path": "g.jsonl"}]
    pq.write_table(
        pa.Table.from_pylist([{**row, "final": row["answer"].split()[-1]} for row in rows]),
        "g.parquet",
    )
    assert data_set("g.parquet", "data") == [{"set": "gsm8k", "path": "g.parquet"}]
    written("g", "g.jsonl")
    assert "train: g.train.jsonl" in Path("g.yaml").read_text()
    row = json.loads(Path("g.train.jsonl").read_text().splitlines()[0])
    assert row == {"id": "0", "problem": "How many? 0", "answer": "0"}


def test_a_problem_on_several_rows_is_either_trained_on_or_held_out(folder: Path) -> None:
    rows = [
        {"question": f"What is {n % 30} and 1?", "answer": n % 30 + 1, "kind": n % 10}
        for n in range(90)
    ]
    Path("r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert statuses(written("r", "r.jsonl")) == {OK}
    texts = [Path(f"r.{name}.jsonl").read_text() for name in ("train", "eval")]
    train, held_out = ([json.loads(line) for line in text.splitlines()] for text in texts)
    assert (len(train), len(held_out)) == (66, 8)
    assert len({row["question"] for row in held_out}) == 8
    assert {row["question"] for row in train}.isdisjoint(row["question"] for row in held_out)
    assert len({row["kind"] for row in held_out}) > 3


@pytest.mark.parametrize(("num_rows", "is_warned"), [(1319, True), (200, False)])
def test_training_on_a_part_of_a_benchmark_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture, num_rows: int, is_warned: bool
) -> None:
    rows = [{"question": f"How many? {n}", "answer": f"I count. #### {n}"} for n in range(num_rows)]
    Path("g.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written("g", "g.jsonl")
    said = "g.jsonl has problems of the benchmark gsm8k: a model trained on"
    assert caplog.text.count(said) == is_warned


def test_evaluating_on_the_training_file_is_refused_at_once(folder: Path) -> None:
    Path("link.csv").symlink_to("data/questions.csv")
    for held_out in ("data/questions.csv", "data/../data/questions.csv", "link.csv"):
        with pytest.raises(ConfigError, match=rf"--eval {held_out} is the file of --data"):
            written("a", held_out=held_out)
    Path("copy.csv").write_bytes(Path("data/questions.csv").read_bytes())
    failed = examine(written("a", held_out="copy.csv")).failed
    assert [finding.check for finding in failed] == ["contamination"]


def test_columns_are_guessed_or_given(folder: Path) -> None:
    Path("x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(
        ProblemsError, match=r"has the columns a, b, and no name .* the problem; .*--columns"
    ):
        data_set("x.csv", "data")
    assert data_set("x.csv", "data", parse_columns("problem=a,answer=b")) == [
        {"set": "x.csv", "columns": {"problem": "a", "answer": "b"}}
    ]
    with pytest.raises(ProblemsError, match="has no column c"):
        data_set("x.csv", "data", parse_columns("problem=c"))
    with pytest.raises(ConfigError, match="is not problem=NAME"):
        parse_columns("question=a")
    Path("header.csv").write_text("question,answer\n")
    with pytest.raises(ProblemsError, match=r"header\.csv has no rows"):
        data_set("header.csv", "data")
    Path("y.csv").write_text("Prompt,solution,label\n1,2,3\n")
    assert data_set("y.csv", "data")[0]["columns"] == {"problem": "Prompt", "answer": "label"}


def test_a_recipe_of_own_files_keeps_ids_and_subjects_for_the_report(folder: Path) -> None:
    row = {"ID": "a", "Category": "algebra", "Question": "1 + 1?", "Answer": 2, "note": "x"}
    Path("t.jsonl").write_text(json.dumps(row) + "\n")
    columns = {"problem": "Question", "answer": "Answer", "id": "ID", "subject": "Category"}
    assert data_set("t.jsonl", "data") == [{"set": "t.jsonl", "columns": columns}]


def test_a_held_out_file_may_have_different_columns(folder: Path) -> None:
    rows = [{"Aufgabe": f"Was ist {n} + 1?", "Ergebnis": str(n + 1)} for n in range(20)]
    Path("t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("same.jsonl").write_text(
        json.dumps({"Aufgabe": "Was ist 50 + 1?", "Ergebnis": "51"}) + "\n"
    )
    Path("own.jsonl").write_text(
        json.dumps({"question": "What is 70 + 1?", "answer": "71", "id": "a"}) + "\n"
    )
    said = parse_columns("problem=Aufgabe,answer=Ergebnis")
    for held_out, columns in (
        ("same.jsonl", {"problem": "Aufgabe", "answer": "Ergebnis"}),
        ("own.jsonl", {"problem": "question", "answer": "answer", "id": "id"}),
    ):
        written(held_out, "t.jsonl", held_out, columns=said)
        data = yaml.safe_load(Path(f"{held_out}.yaml").read_text())["data"]
        assert data["train"][0]["columns"] == {"problem": "Aufgabe", "answer": "Ergebnis"}
        assert data["eval"] == [{"set": held_out, "columns": columns}]


def test_a_file_of_integer_answers_is_not_taken_for_a_benchmark(folder: Path) -> None:
    rows = "".join(f"What is {n} and {n}?,{2 * n}\n" for n in range(60))
    Path("own.csv").write_text("question,answer\n" + rows + 'How much in all?,"1,080"\n')
    assert data_set("own.csv", "data") == [
        {"set": "own.csv", "columns": {"problem": "question", "answer": "answer"}}
    ]


def test_a_folder_with_splits_is_not_trained_on_its_test_rows(folder: Path) -> None:
    (splits := Path("splits")).mkdir()
    for number, name in enumerate(("train", "validation", "test")):
        rows = [{"problem": f"What is {n} + {number}?", "answer": str(n + number)} for n in (7, 9)]
        (splits / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = written("s", "splits")
    assert {one.set for one in (*config.data.train, *config.data.eval)} == {"splits"}
    assert statuses(config) == {OK}


@pytest.mark.slow
def test_unusable_rows_and_too_long_prompts_are_left_out_and_counted(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A few unusable rows or one long prompt must not prevent a recipe."""
    rows = [[f"What is {n} + 1?", " " if n % 8 == 0 else str(n + 1)] for n in range(40)]
    rows[5][0] = "word " * 2000 + rows[5][0]
    with Path("odd.csv").open("w", encoding="utf-8-sig") as file:
        csv.writer(file, lineterminator="\r\n").writerows([["Question", "Answer"], *rows])
    assert statuses(written("odd", "odd.csv")) == {OK}
    kept = [len(Path(f"odd.{name}.jsonl").read_text().splitlines()) for name in ("train", "eval")]
    assert kept == [26, 8]
    assert "5 of 40 rows, with no Answer; row 0: " in caplog.text
    assert "1 of 40 rows, with a prompt of more than 256 tokens; row 5: " in caplog.text
    two = written("two", "odd.csv", "data/questions.csv")
    assert statuses(two) == {OK, WARN}  # "What is 1 + 1?" is in both
    # the same rows, none held out
    assert len(Path("two.train.jsonl").read_text().splitlines()) == 34
    assert caplog.text.count("1 of 40 rows, with a prompt of more than 256 tokens; row 5: ") == 2
    Path("none.csv").write_text("question,answer\n" + "Why?,\n" * 40)
    with pytest.raises(
        DataError, match=r"40 of 40 rows cannot be used .* name other columns with --columns"
    ):
        written("none", "none.csv")


def test_contradicting_rows_are_left_out_by_their_number(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"question": f"What is {n} + 2?", "answer": n + 2} for n in range(40)]
    rows[30]["question"] = rows[8]["question"]
    Path("two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert statuses(written("t", "two.jsonl")) == {OK}
    assert "two.jsonl: left out of the recipe's files: 2 of 40 rows" in caplog.text
    assert "that other rows answer otherwise; row 8: " in caplog.text
    Path("id.jsonl").write_text("".join(json.dumps({**row, "id": 1}) + "\n" for row in rows))
    with pytest.raises(ProblemsError, match=r"^id\.jsonl: 1 ids are used for several problems"):
        written("i", "id.jsonl", columns={"id": "id"})


def test_existing_files_are_not_overwritten(folder: Path) -> None:
    """If files that the recipe would write exist, it is refused and they are kept."""
    own = Path("a.eval.jsonl")
    own.write_text("mine")
    with pytest.raises(ConfigError, match=r"a\.eval\.jsonl exists.* give the recipe another name"):
        written("a")
    assert own.read_text() == "mine"
    assert not Path("a.train.jsonl").exists()


def test_a_small_model_gets_a_learning_rate_and_steps_that_show_something(folder: Path) -> None:
    sizes = {135e6: 2e-5, 0.6e9: 7e-6, 8e9: 2e-6, 32e9: 1e-6, 235e9: 1e-6, 94_080: 3e-5, 0: 1e-6}
    assert {size: learning_rate(size) for size in sizes} == sizes
    hub = {"Qwen/Qwen3-0.6B": 0.6e9, "a/SmolLM2-135M-Instruct": 135e6, "Qwen/Qwen3-30B-A3B": 30e9}
    hub |= {"a/Phi-3-mini-4k": 0.0, "openai/gpt2": 0.0, "a/3billion": 0.0}
    assert {name: named_size({"id": name}) for name in hub} == hub
    train = written("one").train
    # 10 passes over 32 problems are 40 steps of 8
    assert (train.learning_rate, train.total_steps, train.train_prompts) == (3e-5, 30, 8)
    text = Path("one.yaml").read_text()
    assert re.search(r"1e-6 for 32B; small models learn at 1e-5 to 3e-5\.\ntrain:", text)
    assert "  temperature: 1.0\n" in text  # the default, written because it matters
    Path("few.csv").write_text("Question,Answer\n" + "".join(f"{n}?,{n}\n" for n in range(13)))
    few = written("few", "few.csv", "data/questions.csv").train
    assert (few.total_steps, few.train_prompts) == (16, 8)  # 10 passes over 13 problems
    gpus = written("gpus", "few.csv", "data/questions.csv", machine=Machine("cuda", 8, 64))
    sizes_of = gpus.train.total_steps, gpus.train.train_prompts, gpus.train.mini_prompts
    assert sizes_of == (16, 8, 8)
    assert gpus.evaluate.concurrency == gpus.serve.max_num_seqs * gpus.serve.data_parallel
