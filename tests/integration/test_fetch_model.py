"""The stage fetch_model with hub models: artifacts, cache hits, kills, and no network."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dapo_core.errors import ModelError
from dapo_core.model.pretrained import load_tokenizer
from downloads import DownloadError, Unreachable
from flows.cli.stages import fetch_model as fetch_model_command
from flows.config import Config, load_config
from tasks.artifacts.artifact import Artifact
from tasks.artifacts.references import COMMIT, forget_resolved
from tasks.artifacts.stage_key import PROJECT_ROOT
from tasks.artifacts.store import ArtifactStore
from tasks.chain import fetch_model
from tasks.fetched_model import fetch_model_files
from tasks.links import link_of
from tasks.runs.plan import PlannedStage, plan_chain
from tasks.runs.report import model_facts
from tasks.runs.run import Run
from tests.hub_server import Files, HubServer, sha256
from tests.processes import wait_until
from tests.tiny_models import build_tiny_qwen3

RECIPE = PROJECT_ROOT / "configs" / "arith_cpu.yaml"
LEFT_OUT = {"README.md", "onnx/model.onnx", "pytorch_model.bin", "modeling_tiny.py"}
TEMPLATE = "{% for message in messages %}Q: {{ message['content'] }}\n{% endfor %}A:"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A tiny model repository, with a card, other formats and code."""
    folder = build_tiny_qwen3(tmp_path_factory.mktemp("model") / "tiny")
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    extra = {
        "README.md": b"card",
        "onnx/model.onnx": b"onnx",
        "pytorch_model.bin": b"pickle",
        "LICENSE": b"MIT",
    }
    return {**found, **extra, "modeling_tiny.py": b"raise SystemExit('it ran')\n"}


def recipe(folder: Path, *overrides: str) -> Config:
    sets = (
        "model.source=huggingface",
        "model.id=org/tiny",
        f"store.path={folder / 'store'}",
        *overrides,
    )
    return load_config(RECIPE, sets)


def fetched(config: Config) -> Artifact:
    """The stage output of a run."""
    return run_of(config)[1]


def run_of(config: Config) -> tuple[Run, Artifact]:
    with Run.start(config, "fetch-model") as run:
        return run, fetch_model.fn(run, None).result()


def planned(config: Config) -> PlannedStage:
    forget_resolved()
    return {stage.label: stage for stage in plan_chain(config)}["fetch_model"]


def names(artifact: Artifact) -> set[str]:
    return {entry["path"] for entry in artifact.manifest()["files"]}


def test_needed_files_are_fetched_once_per_commit(
    hub: HubServer, tmp_path: Path, files: Files
) -> None:
    repo = hub.model()
    commit = repo.commit(files)
    config = recipe(tmp_path)
    assert f"fetches hf:org/tiny at {commit[:12]}: " in planned(config).note
    first = fetched(config)
    assert names(first) == {*files} - LEFT_OUT
    manifest = first.manifest()
    assert manifest["inputs"][COMMIT] == commit
    assert (
        manifest["inputs"]["file model.safetensors"]
        == f"sha256:{sha256(files['model.safetensors'])}"
    )
    assert manifest["metrics"]["commit"] == commit
    assert load_tokenizer(first.path)
    hub.asked.clear()
    assert fetched(config) == first
    # once in the whole run
    assert [asked.path for asked in hub.asked] == ["/api/models/org/tiny?blobs=true"]
    moved = repo.commit({**files, "README.md": b"another card"})
    assert planned(config).changes == ("input commit changed",)
    second = fetched(config)
    # so nothing after it is made again
    assert (second.key != first.key, second.digest) == (True, first.digest)
    assert second.manifest()["inputs"][COMMIT] == moved
    assert hub.contents() == []  # every file was there under its digest
    assert fetched(recipe(tmp_path, f"model.revision={commit}")).digest == first.digest


def test_a_run_without_a_network_uses_the_last_fetched_model(
    hub: HubServer,
    tmp_path: Path,
    files: Files,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    hub.model().commit(files)
    config = recipe(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    plan = planned(config)
    assert (plan.state, plan.key) == ("runs", None)
    assert (
        "would fetch hf:org/tiny, which cannot be resolved now: HF_HUB_OFFLINE is set" in plan.note
    )
    with pytest.raises(Unreachable, match="HF_HUB_OFFLINE is set, so org/tiny cannot be requested"):
        fetched(config)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    first = fetched(config)
    hub.interfere = lambda handler: handler.refuse(503) is None
    assert fetched(config) == first
    [said] = {
        record.message for record in caplog.records if "Continuing with commit" in record.message
    }
    assert said.startswith(f"{hub.url}/api/models/org/tiny returned HTTP 503")
    assert planned(config).state == "cached"
    other = recipe(tmp_path, "model.revision=v2")
    with pytest.raises(Unreachable, match="HTTP 503"):
        fetched(other)


def command(config: Config, output: Path, *options: str) -> list[str]:
    from dapo_core.config.loading import dump_config

    path = output.with_suffix(".yaml")
    path.write_text(dump_config(config))
    return [
        sys.executable,
        "-m",
        "flows.cli",
        "fetch-model",
        str(path),
        "--output",
        str(output),
        *options,
    ]


def test_a_killed_download_keeps_its_complete_files(
    hub: HubServer, tmp_path: Path, files: Files
) -> None:
    weights = os.urandom(3_000_000)
    commit = hub.model().commit({**files, "model.safetensors": weights})
    words = command(recipe(tmp_path), tmp_path / "out")
    hub.held_from = 2_500_000
    child = subprocess.Popen(words, cwd=PROJECT_ROOT, stdout=subprocess.DEVNULL)
    parts = tmp_path / "out/.parts" / commit
    others = files.keys() - LEFT_OUT - {"model.safetensors"}
    wait_until(lambda: all((parts / name).is_file() for name in others), "the small files")
    wait_until(lambda: any(sha256(weights) in one.path for one in hub.contents()), "the weights")
    child.send_signal(signal.SIGKILL)
    child.wait()
    hub.held_from = None
    hub.asked.clear()
    done = subprocess.run(words, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/model.safetensors").read_bytes() == weights
    assert [sha256(weights) in asked.path for asked in hub.contents()] == [True]
    assert not (tmp_path / "out/.parts").exists()
    assert "download percent 100/100: 7 of 7 files, 3.0 MB of 3.0 MB" in done.stdout


def test_weights_of_different_models_are_not_mixed(
    hub: HubServer, tmp_path: Path, files: Files
) -> None:
    hub.model().commit(files)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/model-00001-of-00002.safetensors").touch()
    with pytest.raises(
        ModelError,
        match=r"out holds model-00001-of-00002\.safetensors, which is not part of the model",
    ):
        fetch_model_files(recipe(tmp_path).model, tmp_path / "out")
    assert hub.contents() == []


def test_a_failed_fetch_leaves_no_output_folder(hub: HubServer, tmp_path: Path) -> None:
    output, sets = tmp_path / "out", ["model.source=huggingface", "model.id=org/none"]
    for error, name in ((DownloadError, "org/none"), (ModelError, "org/tiny")):
        sets[1] = f"model.id={name}"
        with pytest.raises(error):
            fetch_model_command(RECIPE, output, overrides=sets)
        assert not output.exists()
        hub.model().commit({"config.json": b"{}"})
    output.mkdir()
    with pytest.raises(ModelError):
        fetch_model_command(RECIPE, output, overrides=sets)
    assert output.is_dir()


def test_a_commit_that_changed_during_the_run_is_refused(
    hub: HubServer, tmp_path: Path, files: Files
) -> None:
    hub.model().commit(files)
    model = recipe(tmp_path, "model.source=modelscope").model
    with pytest.raises(ModelError, match=r"modelscope:org/tiny changed during the run"):
        fetch_model_files(model, tmp_path / "out", commit="0" * 40)


def test_a_chat_template_is_part_of_the_model(hub: HubServer, tmp_path: Path, files: Files) -> None:
    base = {name: content for name, content in files.items() if name != "chat_template.jinja"}
    hub.model().commit(base)
    template = tmp_path / "mine.jinja"
    template.write_text(TEMPLATE)
    config = recipe(tmp_path, f"model.chat_template={template}")
    model = fetched(config)
    question = [{"role": "user", "content": "2 + 2?"}]
    tokenizer = load_tokenizer(model.path)
    assert (
        tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        == "Q: 2 + 2?\nA:"
    )
    before = link_of(config, "fetch_model").key().key
    template.write_text(TEMPLATE.replace("Q:", "Question:"))
    assert link_of(config, "fetch_model").key().key != before
    for text, said in (
        ("{% for", r"mine\.jinja cannot be rendered: .*; correct"),
        ("{{ bos_token }}", r"drops the user message: it renders"),
    ):
        template.write_text(text)
        with pytest.raises(ModelError, match=said):
            fetch_model_files(config.model, tmp_path / "again")


def test_python_files_are_fetched_only_with_trust_remote_code(
    hub: HubServer, tmp_path: Path, files: Files
) -> None:
    commit = hub.model().commit(files)
    run, model = run_of(recipe(tmp_path, "model.trust_remote_code=true"))
    assert (Path(model.path) / "modeling_tiny.py").read_bytes() == files["modeling_tiny.py"]
    code = "model.trust_remote_code: its Python files ran (modeling_tiny.py)"
    assert model_facts(run) == f"hf:org/tiny, commit {commit}, {code}"
    run, model = run_of(recipe(tmp_path))
    assert "modeling_tiny.py" not in names(model)
    assert model_facts(run) == f"hf:org/tiny, commit {commit}"


class Runs:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch it_ran",)


def test_pickled_weights_are_converted_if_allowed(
    hub: HubServer, tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    monkeypatch.chdir(tmp_path)
    tensors = {
        "a.weight": torch.arange(6.0).reshape(2, 3),
        "b.weight": torch.ones(2, dtype=torch.bfloat16),
    }
    torch.save(tensors, tmp_path / "w.bin")
    bare = {name: content for name, content in files.items() if name != "model.safetensors"}
    hub.model().commit({**bare, "pytorch_model.bin": (tmp_path / "w.bin").read_bytes()})
    with pytest.raises(ModelError, match=r"weights are pickled.*model\.allow_pickle=true"):
        fetch_model_files(recipe(tmp_path).model, tmp_path / "no")
    allowed = recipe(tmp_path, "model.allow_pickle=true").model
    fetch_model_files(allowed, tmp_path / "yes")
    assert not (tmp_path / "yes/pytorch_model.bin").exists()
    read = load_file(tmp_path / "yes/model.safetensors")
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    torch.save({"a.weight": tensors["a.weight"], "b": Runs()}, tmp_path / "w.bin")
    hub.model().commit({**bare, "pytorch_model.bin": (tmp_path / "w.bin").read_bytes()})
    with pytest.raises(
        ModelError, match=r"pytorch_model\.bin contains more than tensors, so it is not loaded"
    ):
        fetch_model_files(allowed, tmp_path / "evil")
    assert not (tmp_path / "it_ran").exists()


def test_an_archive_from_a_web_server_becomes_a_model(
    hub: HubServer, tmp_path: Path, files: Files
) -> None:
    source = tmp_path / "pack/tiny"
    source.mkdir(parents=True)
    for name, content in files.items():
        if "/" not in name:
            (source / name).write_bytes(content)
    archive = Path(shutil.make_archive(str(tmp_path / "tiny"), "gztar", tmp_path / "pack"))
    hub.plain["/tiny.tar.gz"] = archive.read_bytes()
    address = f"{hub.url}/tiny.tar.gz#sha256={sha256(archive.read_bytes())}"
    sets = ("model.source=url", "model.id=null", f"model.urls=['{address}']")
    model = fetched(recipe(tmp_path, *sets))
    assert names(model) == {*files} - LEFT_OUT
    hub.asked.clear()
    assert fetched(recipe(tmp_path, *sets)) == model
    assert hub.asked == []  # a digest needs no server
    assert ArtifactStore(tmp_path / "store").unfinished("fetch_model", model.key) is None
