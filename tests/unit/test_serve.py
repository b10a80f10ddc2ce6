"""Serving without vLLM: command lines, devices, refused settings, reasons of a server's end."""

import json
import os
import shlex
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dapo_core.config.fields import result_values
from dapo_core.engines import vllm_command
from dapo_core.errors import ConfigError, ModelError
from dapo_core.machine.device import device_for
from dapo_core.machine.environment import READY_VARIABLE
from tasks.config.serve import ServeConfig
from tasks.serve_model import command as serving
from tasks.serve_model.checks import longest_sequence, require_servable
from tasks.serve_model.command import (
    base_url,
    choose_port,
    on_this_device,
    serve_command,
    serve_environment,
    shell_line,
    vllm_device,
)
from tasks.serve_model.failure import ServeError, death_of_process, raised_error, refused_argument
from tasks.serve_model.servers import serve_until_interrupted, startup_limit
from tests.tiny_models import build_adapter, build_tiny_qwen3

ALWAYS = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
BRIEF = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"memory_gigabytes": 2, "memory_utilization": 0.5}, r"serve\.memory_utilization=0\.5"),
        ({"extra_args": ("--tensor_parallel_size=2",)}, "tensor_parallel_size=2 cannot .*; use"),
        ({"extra_args": ("-tp", "2")}, r"serve\.extra_args: -tp cannot be given here; use"),
        ({"extra_args": ("--api-key", "x")}, r"use the environment variable VLLM_API_KEY"),
        ({"host": ""}, r"at least 1 character"),
    ],
)
def test_contradicting_keys_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ServeConfig.model_validate(keys)


def test_where_a_model_is_served_does_not_change_the_key() -> None:
    places = ServeConfig(tensor_parallel=2, data_parallel=3, memory_utilization=0.5, port=65_532)
    assert result_values(places) == result_values(ServeConfig())
    assert places.num_devices == 6  # 2 x 3


def test_a_server_gets_time_to_read_its_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", 470 * 10**9)
    # 900 + 470e9 / 200e6
    assert startup_limit(tmp_path, ServeConfig()) == (3250, "3250 s, for 470.0 GB of weights")
    assert startup_limit(tmp_path, ServeConfig(startup_seconds=5))[0] == 5


def test_the_command_line_has_all_settings_and_omits_defaults() -> None:
    settings = ServeConfig(
        tensor_parallel=4,
        data_parallel=2,
        dtype="bfloat16",
        max_model_len=100,
        max_num_seqs=7,
        memory_utilization=0.5,
        eager=True,
        host="::1",
        extra_args=("--seed", "3"),
    )
    assert shlex.join(serve_command("m x", settings, 8000)) == (
        f"{sys.executable} -m dapo_core.engines.vllm_command serve 'm x' --served-model-name "
        "policy --host ::1 --port 8000 --dtype bfloat16 --max-model-len 100 --max-num-seqs 7 "
        "--generation-config vllm --tensor-parallel-size 4 --data-parallel-size 2 "
        "--gpu-memory-utilization 0.5 --enforce-eager --seed 3"
    )
    words = serve_command("m", ServeConfig(), 1)
    assert not {"--tensor-parallel-size", "--data-parallel-size", "--enforce-eager"} & set(words)
    assert not any("memory" in word for word in words)
    words = serve_command("m", ServeConfig(memory_gigabytes=0.5), 1)
    assert words[-2:] == ["--kv-cache-memory-bytes", "536870912"]  # 0.5 GiB = 2^29 bytes


def test_an_adapter_is_served_on_its_base(tmp_path: Path) -> None:
    """Whatever peft's file says of its modules, which may be a regular expression."""
    base = build_tiny_qwen3(tmp_path / "model", seed=1)
    adapter = build_adapter(tmp_path / "adapter", base, "v_proj", "q_proj")
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target_modules": ".*[qv]_proj"}))
    require_servable(adapter, ServeConfig(max_model_len=64), {})
    words = shlex.join(serve_command(adapter, ServeConfig(extra_args=("--seed", "3")), 8000))
    assert f"vllm_command serve {base} --served-model-name policy-base --host" in words
    assert words.endswith(
        f" --enable-lora --lora-modules policy={adapter} --max-lora-rank 8 "
        "--lora-target-modules q_proj v_proj --seed 3"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, r"more than plain LoRA \(use_dora=True\)"),
        ({"peft_type": "IA3"}, r"more than plain LoRA \(peft_type=IA3\)"),
        ({"bias": "all"}, r"more than plain LoRA \(bias=all\)"),
        ({"init_lora_weights": "pissa_niter_4"}, r"plain LoRA \(init_lora_weights=pissa_niter_4\)"),
        ({"r": 0.5}, "cannot be used"),
        ({"base_model_name_or_path": "gone"}, "adapter of the model gone, but this machine has no"),
    ],
)
def test_an_adapter_that_would_be_served_wrongly_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    base = build_tiny_qwen3(tmp_path / "model", seed=1)
    path = build_adapter(tmp_path / "adapter", base, "q_proj") / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=message):
        require_servable(path.parent, ServeConfig(), {})


@pytest.mark.parametrize(("kind", "added"), [("cpu", 3), ("cuda", 0)])
def test_a_cpu_server_disables_chunked_prefill_by_default(
    monkeypatch: pytest.MonkeyPatch, kind: str, added: int
) -> None:
    monkeypatch.setattr(serving, "vllm_device", lambda: device_for(kind))
    settings = ServeConfig(max_model_len=9000, extra_args=("--enable-chunked-prefill",))
    words = on_this_device(settings, {}).extra_args
    assert words == (
        *("--no-enable-chunked-prefill", "--max-num-batched-tokens", "9000")[:added],
        *settings.extra_args,
    )
    pictured = on_this_device(settings, {"image_token_id": 7}).extra_args
    assert [*pictured[added:-1]] == ["--limit-mm-per-prompt", '{"video": 0}']


def test_a_server_takes_as_many_pictures_in_a_prompt_as_its_problems_have() -> None:
    def limits(num_pictures: int, *words: str) -> list[str]:
        settings = ServeConfig(extra_args=words)
        found = on_this_device(settings, {"image_token_id": 7}, num_pictures).extra_args
        return [word for word in found if word.startswith("{")]

    option = "--limit-mm-per-prompt"
    assert limits(3) == ['{"video": 0, "image": {"count": 3}}']
    assert limits(0) == ['{"video": 0, "image": {"count": 1}}']  # for the probe of a sync
    assert limits(2, option, '{"image": 2}') == ['{"image": 2}']
    assert limits(2, option, '{"image": {"width": 64}}') == ['{"image": {"width": 64}}']
    message = r"3 pictures, but serve\.extra_args --limit-mm-per-prompt allows 2 per prompt"
    with pytest.raises(ConfigError, match=message):
        limits(3, option + '={"image": 2}')


def test_the_logged_command_can_be_typed_and_contains_no_key() -> None:
    line = shell_line(
        ["vllm", "a b"], {"CUDA_VISIBLE_DEVICES": "0,1", "X": "1 2", "VLLM_API_KEY": "secret"}
    )
    assert line == "CUDA_VISIBLE_DEVICES=0,1 X='1 2' vllm 'a b'"


def test_a_server_url_matches_its_bind_address() -> None:
    urls = {
        "127.0.0.1": "http://127.0.0.1:80",
        "0.0.0.0": "http://127.0.0.1:80",
        "node7": "http://node7:80",
        "::": "http://[::1]:80",
        "::1": "http://[::1]:80",
        "2001:db8::7": "http://[2001:db8::7]:80",
    }
    assert {host: base_url(host, 80) for host in urls} == urls


class Healthy(BaseHTTPRequestHandler):
    """A server that is healthy from its third request on."""

    num_asked = 0

    def do_GET(self) -> None:
        Healthy.num_asked += 1
        self.send_response(200 if self.path == "/health" and Healthy.num_asked > 2 else 503)
        self.end_headers()


def test_a_typed_server_says_how_to_evaluate_it_once_it_is_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place: dict[str, str] = {}
    monkeypatch.setattr(os, "execvpe", lambda *words: place.update(words[-1]))
    monkeypatch.setattr(vllm_command, "POLL_SECONDS", 0.0)
    settings = ServeConfig(max_model_len=64)
    serve_until_interrupted(build_tiny_qwen3(tmp_path), settings, {"VLLM_API_KEY": "k"})
    url, _, line = place[READY_VARIABLE].partition(" ")
    with ThreadingHTTPServer(("127.0.0.1", int(url.rpartition(":")[2])), Healthy) as server:
        threading.Thread(target=server.serve_forever).start()
        vllm_command.announce(url, line)
        server.shutdown()
    assert Healthy.num_asked == 3
    assert f"{line}\n" in capsys.readouterr().err
    assert line.startswith(f"ready: policy at {url}; ")
    assert f"dapo eval --base-url {url} " in line


def test_an_unavailable_port_names_the_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            ServeError, match=rf"port {port} on 127\.0\.0\.1 cannot be bound: .*serve\.port=0"
        ):
            choose_port(ServeConfig(port=port))
    # TEST-NET-1 and the documentation prefix: no machine has them
    for host in ("192.0.2.77", "2001:db8::7"):
        with pytest.raises(
            ServeError, match=rf"serve\.host={host} has no free port .*; set serve\.host"
        ):
            choose_port(ServeConfig(host=host))


def added(
    monkeypatch: pytest.MonkeyPatch, kind: str, settings: ServeConfig, environment: dict[str, str]
) -> dict[str, str]:
    """What a server gets beside ALWAYS and BRIEF, on a machine with vLLM for that device."""
    monkeypatch.setattr(serving, "vllm_device", lambda: device_for(kind))
    found = serve_environment(settings, environment)
    always = ALWAYS | (BRIEF if kind == "cpu" else {})
    assert found.items() >= always.items()
    return {name: value for name, value in found.items() if name not in always}


@pytest.mark.parametrize(
    ("parallel", "cores", "expected"),
    [
        (2, range(8), "0,1,2|4,5,6"),  # 8 / 2 = 4 cores for a worker, one for its scheduler
        (2, [5, 9], "5|9"),
        (3, [5, 9], "nobind"),
    ],
)
def test_workers_on_a_cpu_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, parallel: int, cores: Any, expected: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    variable, settings = "VLLM_CPU_OMP_THREADS_BIND", ServeConfig(data_parallel=parallel)
    assert added(monkeypatch, "cpu", settings, {}) == {variable: expected}
    assert added(monkeypatch, "cpu", settings, {variable: "auto"}) == {}


@pytest.mark.parametrize(
    ("kind", "cores", "environment", "is_one"),
    [
        ("cpu", 8, {}, True),
        ("cpu", 9, {}, False),
        ("cpu", 8, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}, False),
        ("cuda", 8, {}, False),
    ],
)
def test_a_server_on_few_cores_uses_no_worker_process(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    cores: int,
    environment: dict[str, str],
    is_one: bool,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    found = added(monkeypatch, kind, ServeConfig(), environment)
    assert found == ({"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if is_one else {})


def test_a_server_on_a_cpu_leaves_the_cores_to_others_while_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "vllm_device", lambda: device_for("cpu"))
    assert serve_environment(ServeConfig(), {}).items() >= BRIEF.items()
    chosen = serve_environment(ServeConfig(), {"OMP_WAIT_POLICY": "ACTIVE"})
    assert not BRIEF.keys() & chosen.keys()


@pytest.mark.slow
def test_the_device_matches_the_installed_vllm() -> None:
    import vllm.platforms  # what it decides by itself

    assert vllm_device().kind == vllm.platforms.current_platform.device_type


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({}, None),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 8192, "model_max_length": 131_072}, 131_072),
        ({"max_position_embeddings": 64, "text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"n_positions": 4096, "rope_parameters": {"type": "default", "factor": None}}, 4096),
        ({"n_positions": 32_768, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131_072),
        ({"n_positions": 4096, "rope_parameters": {"full": {"factor": 8.0}, "other": {}}}, 32_768),
    ],
)
def test_the_longest_sequence_includes_rope_scaling(
    config: dict[str, Any], longest: int | None
) -> None:
    assert longest_sequence(config) == longest


def test_lengths_beyond_the_positions_are_refused(tmp_path: Path) -> None:
    model_path = build_tiny_qwen3(tmp_path / "model")  # 512 positions
    require_servable(model_path, ServeConfig(max_model_len=512), {})
    with pytest.raises(ModelError, match=r"serve\.max_model_len=513 is above the 512 positions"):
        require_servable(model_path, ServeConfig(max_model_len=513), {})
    require_servable(
        model_path, ServeConfig(max_model_len=513), {"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}
    )
    overrides = ("--hf-overrides", json.dumps({"max_position_embeddings": 1024}))
    require_servable(model_path, ServeConfig(max_model_len=513, extra_args=overrides), {})


INDEX = json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", None, r"lacks weights \(\*\.safetensors\)"),
        ("model.safetensors", "cut", r"model\.safetensors is not a complete safetensors file"),
        (
            "model.safetensors",
            "version https://git-lfs.github.com/spec/v1\n",
            r"has 1 Git LFS pointer instead of files, such as model\.safetensors",
        ),
        (
            "model.safetensors.index.json",
            INDEX,
            r"lacks 1 of its 2 weight files, .*model-2\.safetensors",
        ),
        ("tokenizer.json", None, r"lacks a tokenizer"),
        ("config.json", "", r"config\.json cannot be read"),
    ],
)
def test_an_incomplete_model_folder_is_refused(
    tmp_path: Path, file: str, content: str | None, message: str
) -> None:
    model_path = build_tiny_qwen3(tmp_path / "model")
    path = model_path / file
    if content == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif content is None:
        for found in model_path.glob(f"{path.stem}*"):
            found.unlink()
    else:
        path.write_text(content)
    with pytest.raises(ModelError, match=message):
        require_servable(model_path, ServeConfig(max_model_len=128), {})


# Lines that vLLM 0.32 wrote, in its order; "..." where a traceback was.
UNKNOWN_FLAG = [
    "Triton is installed, but doesn't include CPU backend. Disabling Triton.",
    "usage: vllm [-h] [-v]",
    "            "
    "{chat,complete,serve,launch,bench,collect-env,download-kernels,preload,run-batch,snapshot}",
    "            ...",
    "vllm: error: unrecognized arguments: --no-such-flag",
]
WRONG_CHOICE = [
    "usage: vllm serve [model_tag] [options]",
    "vllm serve: error: argument --dtype: invalid choice: 'nosuch' (choose from 'auto', "
    "'bfloat16')",
]
WRONG_VALUE = [
    "    s.__pydantic_validator__.validate_python(ArgsKwargs(args, kwargs), self_instance=s)",
    "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig",
    "  Value error, Unknown quantization method: nosuch. Must be one of ['awq', 'auto_awq'].",
    "    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
]
NO_MEMORY = [
    "(Worker pid=856) ERROR 11-21 19:07:10 [multiproc_executor.py:1063]     raise ValueError(",
    "(Worker pid=856) ERROR 11-21 19:07:10 [multiproc_executor.py:1063] ValueError: Available "
    "memory on node 0",
    "(EngineCore pid=612) ERROR 11-21 19:07:10 [core.py:1510] RuntimeError: Worker failed with "
    "error 'Available memory on node 0', please check the stack trace above for the root cause",
    "(EngineCore pid=612) Process EngineCore:",
    "    raise RuntimeError(",
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "
    "{}",
    "resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 1 leaked "
    "shared_memory objects",
]
PORT_TAKEN = ["    sock.bind(addr)", "OSError: [Errno 98] Address already in use"]


@pytest.mark.parametrize(
    ("lines", "refused", "raised"),
    [
        (UNKNOWN_FLAG, "vllm: error: unrecognized arguments: --no-such-flag", None),
        (WRONG_CHOICE, WRONG_CHOICE[-1], None),
        (WRONG_VALUE, None, "\n".join(WRONG_VALUE[1:3])),
        (NO_MEMORY, None, "ValueError: Available memory on node 0"),
        (PORT_TAKEN, None, "OSError: [Errno 98] Address already in use"),
        (["(APIServer pid=7) INFO 11-21 19:07:10 [launcher.py:9] Starting"], None, None),
        ([], None, None),
    ],
)
def test_the_servers_error_is_found_in_its_output(
    lines: list[str], refused: str | None, raised: str | None
) -> None:
    assert refused_argument(lines) == refused
    assert raised_error(lines) == raised


def test_a_killed_vllm_process_is_named() -> None:
    """vLLM raises other, uninformative errors after it."""
    lines = [
        "(EngineCore pid=71) INFO 11-22 13:00:00 [cpu.py:1] loading",
        "(EngineCore pid=71) ERROR 11-22 13:00:01 [multiproc_executor.py:315] Worker proc "
        "VllmWorker-0 died unexpectedly (exit code: -4), shutting down executor.",
        "(EngineCore pid=71) ERROR 11-22 13:00:02 [core.py:1113] ValueError: cancelled",
        "(APIServer pid=70) RuntimeError: Engine core initialization failed. See root cause above.",
    ]
    said = death_of_process(lines)
    assert said is not None
    assert said.startswith("Worker proc VllmWorker-0 died unexpectedly (exit code: -4)")
    assert "set serve.dtype=float32" in said
    # it raised, and said what
    assert death_of_process([line.replace("-4", "1") for line in lines]) is None
    killed = "RuntimeError: Process EngineCore_0 (PID: 7) died with exit code -9"
    assert death_of_process([killed]) is not None
