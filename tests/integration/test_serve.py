"""A real `vllm serve` matches the policy, protects its key and reports failures."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo_core.engines.vllm_warnings import EXPECTED_WARNINGS
from dapo_core.machine.environment import SOCKETS_VARIABLE
from eval.endpoint import Sampling
from eval.problems.items import EvaluationSet, Item
from eval.requests.recorder import Benchmark
from eval.requests.run import evaluate_all
from tasks.config.evaluate import EvaluateConfig
from tasks.config.serve import ServeConfig
from tasks.evaluation.settings import limits_of, sampling_of
from tasks.processes import supervisor
from tasks.serve_model.command import served_name
from tasks.serve_model.failure import ServeError
from tasks.serve_model.servers import Server, serve_model
from tests.tiny_models import build_adapter, build_tiny_qwen3

SETTINGS = ServeConfig(
    dtype="float32",
    max_model_len=128,
    max_num_seqs=8,
    memory_gigabytes=0.1,
    eager=True,
    startup_seconds=240,
)
NUM_ITEMS = 6
MAX_RESPONSE_TOKENS = 12


@dataclass(frozen=True)
class Serving:
    """A running server, its model and its processes."""

    server: Server
    model_path: Path
    log_path: Path
    processes: dict[int, str]
    folders: set[Path]  # for sockets


def new_descendants(before: dict[int, str]) -> dict[int, str]:
    return {pid: at for pid, at in supervisor.descendants(os.getpid()).items() if pid not in before}


def socket_folder(pid: int) -> Path | None:
    """The socket folder of a vLLM process; None for others."""
    environment = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(
        (
            Path(entry.partition("=")[2])
            for entry in environment
            if entry.startswith(SOCKETS_VARIABLE)
        ),
        None,
    )


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("serve")
    model_path = build_tiny_qwen3(folder / "model", seed=9)
    before = supervisor.descendants(os.getpid())
    with serve_model(
        model_path, SETTINGS, folder / "serve.log", name=served_name("0123456789abcdef")
    ) as server:
        processes = new_descendants(before)
        folders = set(filter(None, map(socket_folder, processes)))
        yield Serving(server, model_path, folder / "serve.log", processes, folders)
    assert len(processes) >= 3  # our supervisor, the API server, its engine
    assert new_descendants(before) == {}
    assert not any(place.exists() for place in folders)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.base_url}/health", trust_env=False)


def client_of(serving: Serving, api_key: str | None = None) -> httpx.Client:
    headers = {"Authorization": f"Bearer {api_key or serving.server.api_key}"}
    return httpx.Client(
        base_url=serving.server.base_url, headers=headers, timeout=300, trust_env=False
    )


def test_the_server_is_healthy_with_its_own_name_and_socket_folder(serving: Serving) -> None:
    with client_of(serving) as client:
        assert client.get("/health").status_code == 200
        models = client.get("/v1/models").json()["data"]
    assert [model["id"] for model in models] == [serving.server.model] == ["policy-0123456789ab"]
    assert models[0]["max_model_len"] == SETTINGS.max_model_len
    assert serving.server.base_url.startswith("http://127.0.0.1:")
    (folder,) = serving.folders
    assert any(path.is_socket() for path in folder.iterdir())
    assert list(folder.glob("vllm_dist_*"))  # a file, which vLLM leaves behind


def test_the_log_has_no_warning_about_what_the_server_sets_on_purpose(serving: Serving) -> None:
    log = serving.log_path.read_text()
    assert "--no-enable-chunked-prefill" in " ".join(serving.server.command.split())
    assert " WARNING " in log  # others are shown
    assert not [words for known in EXPECTED_WARNINGS.values() for words in known if words in log]


def test_a_wrong_key_is_refused_and_the_right_one_is_not_exposed(serving: Serving) -> None:
    request = {"model": serving.server.model, "prompt": "1", "max_tokens": 1}
    with client_of(serving, "guessed") as client:
        assert client.get("/v1/models").status_code == 401
        assert client.post("/v1/completions", json=request).status_code == 401
    assert len(serving.server.api_key) >= 32
    assert serving.server.api_key not in serving.log_path.read_text()
    for pid in serving.processes:
        assert serving.server.api_key not in Path(f"/proc/{pid}/cmdline").read_text()


def completion(serving: Serving, **parameters: Any) -> dict[str, Any]:
    with client_of(serving) as client:
        answer = client.post("/v1/completions", json={"model": serving.server.model, **parameters})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def policy_log_probs(serving: Serving, ids: list[int]) -> torch.Tensor:
    """Next-token log-probs [T - 1, V] from plain transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(serving.model_path, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)


def test_prompt_log_probs_match_the_policy(serving: Serving) -> None:
    ids = [5, 6, 7, 40, 90, 200, 31, 8, 250, 17, 17, 64]
    choice = completion(serving, prompt=ids, max_tokens=1, prompt_logprobs=0, temperature=0)
    expected = policy_log_probs(serving, ids)
    served = choice["prompt_logprobs"]
    assert served[0] is None
    for position, token in enumerate(ids[1:]):
        assert served[position + 1][str(token)]["logprob"] == pytest.approx(
            expected[position, token].item(), abs=1e-3
        )


def test_greedy_answers_match_the_policy(serving: Serving) -> None:
    prompt_ids = [5, 6, 7, 40, 90]
    choice = completion(
        serving, prompt=prompt_ids, max_tokens=10, temperature=0, logprobs=0, return_token_ids=True
    )
    response_ids = choice["token_ids"]
    expected = policy_log_probs(serving, prompt_ids + response_ids)[len(prompt_ids) - 1 :]
    assert response_ids == expected.argmax(-1).tolist()
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(
        expected.max(-1).values.tolist(), abs=1e-3
    )


def test_an_evaluation_records_the_policys_own_answers(serving: Serving, tmp_path: Path) -> None:
    items = [
        Item(
            f"sum-{number}",
            ({"role": "user", "content": f"What is {number} + 7?"},),
            str(number + 7),
        )
        for number in range(NUM_ITEMS)
    ]
    settings = EvaluateConfig(max_response_tokens=MAX_RESPONSE_TOKENS, concurrency=2)
    benchmark = Benchmark(EvaluationSet(tuple(items)), sampling_of(settings, None), tmp_path)
    [summary] = evaluate_all(
        [benchmark], serving.server, limits=limits_of(settings), model_digest="digest"
    )
    assert (summary.n, summary.num_items, summary.request_failed_rate) == (
        NUM_ITEMS,
        NUM_ITEMS,
        0.0,
    )
    served = json.loads((tmp_path / "settings.json").read_text())["served"]
    assert served["root"] == str(serving.model_path)
    assert len(served["logprobs"]) == 8
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(serving.model_path)
    model: Any = AutoModelForCausalLM.from_pretrained(serving.model_path, dtype=torch.float32)
    for row, item in zip(rows, items, strict=True):
        assert row["id"] == item.id
        text = tokenizer.apply_chat_template(
            list(item.prompt), tokenize=False, add_generation_prompt=True
        )
        prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        ids = model.generate(**prompt, max_new_tokens=MAX_RESPONSE_TOKENS, do_sample=False)[0]
        response_ids = ids[prompt.input_ids.shape[1] :]
        assert row["response"] == tokenizer.decode(response_ids, skip_special_tokens=True)
        assert row["finish_reason"] in {"length", "stop"}
        assert row["response_tokens"] == len(response_ids)


def test_option_log_probs_match_the_policy(serving: Serving, tmp_path: Path) -> None:
    """As in lm-eval: the tokens of the whole text beyond those of the prompt alone."""
    options = ("31", "a hundred and seven", "no")
    items = [
        Item(f"sum-{number}", f"{number} + 7 is:\n", options[0], options=options)
        for number in range(2)
    ]
    benchmark = Benchmark(
        EvaluationSet(tuple(items), grader="loglikelihood"),
        Sampling(max_tokens=MAX_RESPONSE_TOKENS),
        tmp_path,
    )
    [summary] = evaluate_all([benchmark], serving.server)
    tokenizer = AutoTokenizer.from_pretrained(serving.model_path)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    for row, item in zip(rows, items, strict=True):
        start = str(item.prompt).rstrip()
        num_tokens = len(tokenizer(start).input_ids)
        expected = []
        for option in options:
            ids = tokenizer(f"{start}\n{option}").input_ids
            found = policy_log_probs(serving, ids)[num_tokens - 1 :]
            expected.append(float(found[range(len(found)), ids[num_tokens:]].sum()))
        assert row["details"] == {
            "options": list(options),
            "log_probs": pytest.approx(expected, abs=2e-3),
        }
        assert row["response"] == options[expected.index(max(expected))]
    assert summary.accuracy == sum(row["response"] == options[0] for row in rows) / 2


def test_an_adapter_is_served_with_its_weights(tmp_path: Path) -> None:
    base = build_tiny_qwen3(tmp_path / "model", seed=9)
    adapter = build_adapter(tmp_path / "adapter", base, "q_proj", "down_proj")
    ids = [5, 6, 7, 40, 90, 200, 31, 8, 250, 17, 17, 64]
    with serve_model(adapter, SETTINGS, tmp_path / "serve.log", name="policy-1") as server:
        serving = Serving(server, base, tmp_path / "serve.log", {}, set())
        choice = completion(serving, prompt=ids, max_tokens=1, prompt_logprobs=0, temperature=0)
    served = torch.tensor(
        [choice["prompt_logprobs"][n][str(token)]["logprob"] for n, token in enumerate(ids) if n]
    )
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(model, adapter)(torch.tensor([ids])).logits[0, :-1]
    chosen = torch.tensor(ids[1:]).unsqueeze(-1)
    expected = logits.log_softmax(-1).gather(-1, chosen).squeeze(-1)
    torch.testing.assert_close(served, expected, rtol=0, atol=1e-3)
    without = policy_log_probs(serving, ids).gather(-1, chosen).squeeze(-1)
    assert (served - without).abs().max() > 0.1


def test_a_server_that_cannot_load_the_model_quotes_vllms_reason(tmp_path: Path) -> None:
    model_path = build_tiny_qwen3(tmp_path / "model")
    config = json.loads((model_path / "config.json").read_text())
    config["architectures"] = ["NoSuchForCausalLM"]
    config["model_type"] = "no_such_model"
    (model_path / "config.json").write_text(json.dumps(config))
    before = supervisor.descendants(os.getpid())
    with (
        pytest.raises(ServeError) as caught,
        serve_model(model_path, SETTINGS, tmp_path / "serve.log"),
    ):
        pass
    message = str(caught.value)
    assert "vllm serve ended with exit code" in message
    assert str(tmp_path / "serve.log") in message
    said = "  Value error, The checkpoint you are trying to load has model type `no_such_model`"
    assert said in message.partition("vLLM reports: ")[2]
    assert message.endswith("It ended before it was healthy; correct serve.* or the model folder")
    assert "Traceback" in message or "  | " in message
    assert new_descendants(before) == {}
