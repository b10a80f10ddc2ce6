"""Sampling, thinking and other request fields, and how settings record them."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from dapo_core.errors import ConfigError
from eval.endpoint import Endpoint, Sampling
from eval.problems import ProblemsError
from eval.problems.prompts import TEMPLATES, Template, make_prompt
from eval.report.compare import ComparisonError, compare_evaluations
from eval.report.report import UNKNOWN, describe_measurement
from eval.results.rows import load_evaluation, make_settings
from flows.config import load_config, load_config_or_defaults
from tasks.config.evaluate import BenchmarkConfig
from tasks.evaluation.settings import load_sets, sampling_of
from tests.evaluations import make_items, write_results


def sampling(folder: Path | None, *overrides: str) -> Sampling:
    settings = load_config_or_defaults(
        None, [f"evaluate.{override}" for override in overrides]
    ).evaluate
    return sampling_of(settings, folder)


def model(folder: Path, **fields: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(fields))
    return folder


def test_template_arguments_and_extra_fields_are_sent_and_recorded() -> None:
    asked = sampling(None, "chat_template_kwargs.enable_thinking=false", "extra_body={min_p: 0.05}")
    body = asked.body(1)
    sent = {"chat_template_kwargs": {"enable_thinking": False}, "min_p": 0.05, "seed": 1235}
    assert sent.items() <= body.items()
    items, recorded = make_items(1), asked.to_json()
    assert recorded["extra_body"] == {"min_p": 0.05}
    assert json.loads(json.dumps(recorded)) == recorded
    plain = sampling(None)
    assert not {"chat_template_kwargs", "extra_body", "source"} & plain.to_json().keys()
    assert not {"chat_template_kwargs", "top_k", "stop"} & plain.body(0).keys()
    # Completions have no chat template; a suite may mix them with chats.
    config = load_config_or_defaults(
        None, ["evaluate.chat_template_kwargs={enable_thinking: true}"]
    ).evaluate
    base = config.of(BenchmarkConfig(set="math500", api="completions"))
    assert sampling_of(base, None).chat_template_kwargs is None
    assert len({config, config.model_copy(), base}) == 2  # sections stay hashable
    assert (
        make_settings(items, Endpoint("http://localhost", "m"), asked, None)["sampling"] == recorded
    )


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (  # Qwen3's file
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1]},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        (  # Qwen2.5's
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
        ),
        ({"top_p": 0.9, "temperature": None}, {"temperature": 1.0, "top_p": 0.9}),  # vLLM's default
        ({"do_sample": False}, {"temperature": 0.0, "top_p": 1.0}),
    ],
)
def test_the_model_s_own_sampling_is_sent_and_recorded(
    tmp_path: Path, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = sampling(model(tmp_path, **fields), "sampling=model", "num_samples=4")
    assert found.body(0) == {**expected, "max_tokens": 20480, "seed": 1234}
    assert (found.to_json()["source"], found.num_samples) == ("model", 4)
    # The recipe's extra_body overrides the model's file.
    again = sampling(tmp_path, "sampling=model", "extra_body={repetition_penalty: 1.2}")
    assert again.body(0)["repetition_penalty"] == 1.2


def test_a_model_without_sampling_defaults_is_refused_and_an_unknown_folder_uses_the_server_s(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=r"needs .*generation_config\.json: .*No such file"):
        sampling(tmp_path, "sampling=model")
    with pytest.raises(ConfigError, match="sets no temperature, top_p or top_k"):
        sampling(model(tmp_path, eos_token_id=2), "sampling=model")
    (tmp_path / "generation_config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="sets no temperature"):
        sampling(tmp_path, "sampling=model")
    with caplog.at_level(logging.WARNING):
        found = sampling(None, "sampling=model")
    assert "the server's defaults apply" in caplog.text
    assert found.body(0) == {"max_tokens": 20480, "seed": 1234}
    assert (found.to_json()["source"], found.to_json()["temperature"]) == ("server", None)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["extra_body={temperature: 1}"],
            r"extra_body\.temperature is set by evaluate\.temperature",
        ),
        (["extra_body=5"], r"evaluate\.extra_body = 5 is refused: it must be a section with keys"),
        (
            ["sampling=model", "temperature=0.6"],
            r"temperature=0\.6 would be ignored by evaluate\.s",
        ),
        (
            ["api=completions", "chat_template_kwargs={enable_thinking: false}"],
            r"\{'enable_thinking': False\} would be ignored by evaluate\.api=completions",
        ),
    ],
)
def test_fields_that_conflict_with_another_key_are_refused_by_name(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        sampling(None, *overrides)


def test_a_benchmark_s_own_temperature_replaces_the_model_s() -> None:
    section = load_config_or_defaults(None, ["evaluate.sampling=model"]).evaluate
    assert section.of(BenchmarkConfig(set="aime24", temperature=0.8)).sampling == "settings"
    assert section.of(BenchmarkConfig(set="aime24")).sampling == "model"
    # With loglikelihood nothing is sampled.
    loglikelihood = section.of(BenchmarkConfig(set="gpqa-diamond", mode="loglikelihood"))
    assert sampling_of(loglikelihood, None) == Sampling(max_tokens=1)


def test_the_system_prompt_replaces_the_file_s() -> None:
    own = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"})
    template = Template("given", "{problem}", system="Think.")
    thinking = {"role": "system", "content": "Think."}
    assert make_prompt(template, "chat", "1 + 1?", own) == (thinking, own[1])
    assert (
        make_prompt(Template("bare", "{problem}", system="Think."), "chat", "2?", None)[0]
        == thinking
    )
    assert make_prompt(template, "completions", "1 + 1?", own) == "Think.\n\n1 + 1?"
    assert template.to_json()["system"] == "Think."
    assert "system" not in TEMPLATES["aisbench"].to_json()


def test_models_are_comparable_with_their_own_sampling_and_the_report_shows_it(
    tmp_path: Path,
) -> None:
    items = make_items(4)
    sides = []
    for side, temperature in (("before", 0.6), ("after", 0.7)):
        of_model = Sampling(max_tokens=64, temperature=temperature, top_k=20, source="model")
        settings = {"sampling": of_model.to_json()}
        sides.append(load_evaluation(write_results(tmp_path / side, "rrww", items, side, settings)))
    said = describe_measurement(compare_evaluations(*sides), UNKNOWN)["sampling"]
    words = "top_p 1, top_k 20 (the model's generation_config.json), at most 64 tokens, seed 1234"
    assert said == f"temperature 0.6, {words}; after: temperature 0.7, {words}"
    fixed = write_results(tmp_path / "fixed", "rrww", items)
    with pytest.raises(ComparisonError, match=r"sampling\.source: unset before, model after"):
        compare_evaluations(load_evaluation(fixed), sides[1])


def test_the_held_out_file_of_a_recipe_is_read_with_its_columns(tmp_path: Path) -> None:
    own, other = tmp_path / "own.eval.csv", tmp_path / "other.csv"
    own.write_text("number,asked,result\nA7,What is 1 + 1?,2\n")
    other.write_text("asked,value\nWhat is 1 + 1?,2\n")
    path = tmp_path / "own.yaml"
    columns = "columns: {id: number, problem: asked, answer: result}"
    path.write_text(
        f"data: {{train: arithmetic, eval: [{{set: {own}, {columns}, system_prompt: Add.}}]}}\n"
    )
    config = load_config_or_defaults(path)
    [item] = load_sets(config, tmp_path, str(own))[""].items
    assert (item.id, item.gold, item.prompt[0]["content"]) == ("A7", "2", "Add.")
    with pytest.raises(ProblemsError, match=r"columns asked, value.*data\.columns\.problem"):
        load_sets(config, tmp_path, str(other))
    usual = tmp_path / "usual.csv"
    usual.write_text("problem,answer\n1 + 1,2\n")
    path.write_text(f"data: {{train: arithmetic, eval: {usual}, prompt_template: '{{problem}} ='}}")
    config = load_config_or_defaults(path)
    [item] = load_sets(config, tmp_path, str(usual))[""].items
    assert item.prompt[-1]["content"] == "1 + 1 ="


def test_commands_that_only_evaluate_need_neither_data_nor_model(tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    path.write_text(
        "evaluate: {benchmarks: [math500]}\ndata: {columns: {problem: question, answer: result}}\n"
    )
    config = load_config_or_defaults(path, ["evaluate.num_samples=2"])
    assert ([*config.evaluate.named], config.evaluate.num_samples) == (["math500"], 2)
    assert config.run.name == "suite"
    assert config.data.columns.answer == "result"
    with pytest.raises(
        ConfigError, match=r"data\.train is not set.*\n.*data\.eval.*\n.*model\.path is not set"
    ):
        load_config(path)  # a run needs them
    path.write_text("evaluate: {benchmarks: [math500]}\nmodel: {sorce: recipe}\n")
    with pytest.raises(ConfigError, match=r"unknown key model\.sorce"):
        load_config_or_defaults(path)
