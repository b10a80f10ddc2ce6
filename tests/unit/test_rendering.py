"""Rendered cluster starts equal the files in tests/data/rendered, which shells and schemas accept."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from flows.cli import app
from flows.config import load_config_or_defaults
from tasks.nodes import leave
from tasks.preflight.environment import INTERFACE, wanted
from tests.kubernetes_schemas import refusals

ROOT = Path(__file__).resolve().parents[2]
DATA = Path("tests/data/rendered")
RECIPE = "configs/dapo_qwen3_32b_math.yaml"
# The words of each form. To render the files again, add `--output tests/data/rendered`.
FORMS = {
    "scripts": f"{DATA}/inventory.yaml --scripts".split(),
    "slurm": f"{DATA}/alike.yaml --slurm --config {RECIPE} --set run.seed=2 --site partition=npu".split(),
    "cluster": f"{DATA}/alike.yaml --kuberay".split(),
    "job": (
        f"{DATA}/alike.yaml --kuberay --config {RECIPE} --site queue=gang --site image=mine:1 "
        "--site claim=my-store --site cpu=180 --site memory=1400Gi"
    ).split(),
}
SHELL_FILES = ("node1.sh", "node2.sh", "dapo_qwen3_32b_math.sbatch")
SHELLCHECK = shutil.which("shellcheck")


@pytest.fixture(autouse=True)
def _in_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def _run(*words: str) -> Result:
    done = CliRunner().invoke(app, ["cluster", "render", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done


def _render(*words: str) -> str:
    return _run(*words).stdout


def _remarks(*words: str) -> str:
    """The remarks on standard error."""
    return _run(*words).stderr


def _inventory(folder: Path, text: str) -> str:
    (folder / "i.yaml").write_text(f"{text}\n")
    return str(folder / "i.yaml")


def _pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pods of the head and of the workers, if any."""
    spec = document["spec"].get("rayClusterSpec", document["spec"])
    return [
        group["template"]["spec"]
        for group in (spec["headGroupSpec"], *spec.get("workerGroupSpecs", ()))
    ]


@pytest.mark.parametrize("form", FORMS)
def test_rendered_files_equal_the_recorded_ones(form: str, tmp_path: Path) -> None:
    _render(*FORMS[form], "--output", str(tmp_path))
    for path in tmp_path.iterdir():
        text = path.read_text().replace(importlib.metadata.version("ray"), "2.60.0")
        assert text == (DATA / path.name).read_text(), path.name


@pytest.mark.parametrize("name", SHELL_FILES)
def test_bash_and_shellcheck_accept_the_scripts(name: str) -> None:
    subprocess.run(["bash", "-n", DATA / name], check=True)
    if SHELLCHECK is None:
        pytest.skip("shellcheck is not installed (Debian's package of that name)")
    done = subprocess.run([SHELLCHECK, DATA / name], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("name", ["node1.sh", "dapo_qwen3_32b_math.sbatch", "dapo.yaml"])
def test_exported_variables_are_those_of_the_table(name: str) -> None:
    overrides = ["train.device=npu", "train.ray_address=auto"]
    config = load_config_or_defaults(Path(RECIPE) if name.endswith("sbatch") else None, overrides)
    text = (DATA / name).read_text()
    for variable, value in wanted(config).items():
        if name == "dapo.yaml":
            assert value == INTERFACE or f'{{name: {variable}, value: "{value}"}}' in text
        elif value == INTERFACE:
            assert f'export {variable}="' in text
            assert '$INTERFACE"\n' in text
        elif variable != "HCCL_CONNECT_TIMEOUT" or name != "node1.sh":  # set by the inventory there
            assert f"export {variable}={value}\n" in text


@pytest.mark.parametrize(
    ("device", "options"),
    [("cpu", "--num-cpus=3"), ("cuda", "--num-gpus=3"), ("npu", "'--resources={\"NPU\": 3}'")],
)
def test_ray_and_pods_get_the_inventory_s_devices(
    device: str, options: str, tmp_path: Path
) -> None:
    inventory = _inventory(tmp_path, f"hosts: [a]\ndevice: {device}\ndevices: 3")
    assert f" {options} " in _render(inventory, "--scripts")
    [document] = yaml.safe_load_all(_render(inventory, "--kuberay"))
    head = document["spec"]["headGroupSpec"]
    limits = head["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {
        {"cpu": "cpu", "cuda": "nvidia.com/gpu", "npu": "huawei.com/Ascend910"}[device]: 3
    }
    # KubeRay writes --KEY=VALUE into a shell line.
    key, value = next(iter(head["rayStartParams"].items()))
    words = subprocess.run(
        ["bash", "-c", f"printf %s --{key}={value}"], capture_output=True, text=True
    ).stdout
    assert words == options.strip("'")
    assert "workerGroupSpecs" not in document["spec"]  # one host


@pytest.mark.parametrize("form", [("--scripts",), ("--slurm", "--config", RECIPE)])
def test_setup_runs_before_anything_else(form: tuple[str, ...], tmp_path: Path) -> None:
    inventory = _inventory(tmp_path, "hosts: [a]\ndevices: 16\nsetup: . /etc/set_env.sh")
    changes = (
        ("--set", "train.num_ranks=8", "--set", "rollout.num_workers=2")
        if "--config" in form
        else ()
    )
    text = _render(inventory, *form, *changes)
    before = r"^cd .*\n(if \[ .* = start \]; then\n)?set \+eu #.*\n"
    assert re.search(before + r"\{\n\. /etc/set_env\.sh\n\} \|\| \{\n", text, re.MULTILINE)


def test_a_setup_that_fails_ends_the_start(tmp_path: Path) -> None:
    script, inventory = tmp_path / "a.sh", f"hosts: [a]\ndevices: 16\nsetup: . {tmp_path}/none.sh"
    script.write_text(_render(_inventory(tmp_path, inventory), "--scripts"))
    start, stop = (
        subprocess.run(["bash", script, v], capture_output=True, text=True)
        for v in ("start", "stop")
    )
    assert (start.returncode, "setup failed" in start.stderr) == (1, True), start.stderr
    assert (stop.returncode, "this script has no Ray running" in stop.stdout) == (0, True), stop


def test_a_batch_file_for_one_node_uses_its_address(tmp_path: Path) -> None:
    """The node's own name may resolve to loopback."""
    line = "RAY_HEAD=${ADDRESS/*:*/[$ADDRESS]}:$PORT"
    text = _render(_inventory(tmp_path, "hosts: [a]\ndevices: 64"), "--slurm", "--config", RECIPE)
    assert f'find_interface \'\' "$HEAD" "$HEAD"\n{line}' in text
    assert line not in _render(*FORMS["slurm"])


@pytest.mark.parametrize("name", ["a/b", "../x", "my run"])
def test_a_batch_file_needs_a_plain_name(name: str, tmp_path: Path) -> None:
    words = [
        "cluster",
        "render",
        *FORMS["slurm"],
        "--set",
        f"run.name={name}",
        "--output",
        str(tmp_path),
    ]
    done = CliRunner().invoke(app, words)
    assert done.exit_code != 0
    assert "names a file and a job" in f"{done.output} {done.exception}"


def test_files_with_the_values_of_env_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    _render(*FORMS["scripts"], "--output", str(tmp_path / "new"))
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o600}


def test_scripts_of_removed_hosts_are_named_and_kept(tmp_path: Path) -> None:
    inventory, folder = tmp_path / "i.yaml", tmp_path / "start"
    inventory.write_text("hosts: [a, b, c]\ndevices: 1\n")
    _render(str(inventory), "--scripts", "--output", str(folder))
    (folder / "mine.sh").write_text("# Rendered from nothing\n")
    inventory.write_text("hosts: [a]\ndevices: 1\n")
    remark = _remarks(str(inventory), "--scripts", "--output", str(folder))
    assert f"no longer in {inventory}: b.sh, c.sh; stop Ray there" in remark
    assert {path.name for path in folder.iterdir()} == {"a.sh", "b.sh", "c.sh", "mine.sh"}


def test_slurm_accepts_the_longest_stop() -> None:
    assert "#SBATCH --signal=B:TERM@65535\n" in _render(
        *FORMS["slurm"], "--set", "flow.stop_seconds=65475"
    )


def test_only_the_site_s_own_gres_replaces_the_devices() -> None:
    assert "--gres=npu:16" in _render(*FORMS["slurm"], "--site", "gres-flags=enforce-binding")
    assert "--gres=npu:16" not in _render(*FORMS["slurm"], "--site", "gres=npu:8")


def _documents() -> dict[str, Any]:
    """The KubeRay object of each file, which is the last one."""
    names = ("dapo.yaml", "dapo-qwen3-32b-math.yaml")
    return {name: list(yaml.safe_load_all((DATA / name).read_text()))[-1] for name in names}


def test_kuberay_yaml_matches_kuberay_s_definition() -> None:
    schema = yaml.safe_load(Path("tests/data/kuberay/schema.yaml").read_text())
    for name, document in _documents().items():
        jsonschema.validate(document, schema)
        document["spec"]["headGroupSpecs"] = {}
        with pytest.raises(jsonschema.ValidationError):  # a misspelt field is refused
            jsonschema.validate(document, schema)
        assert document["metadata"]["name"] == name.removesuffix(".yaml")


@pytest.mark.slow
def test_kubernetes_accepts_the_pods() -> None:
    for document in _documents().values():
        spec = document["spec"].get("rayClusterSpec", document["spec"])
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            assert refusals("podtemplatespec-v1", group["template"]) == []
    carried, _ = yaml.safe_load_all((DATA / "dapo-qwen3-32b-math.yaml").read_text())
    assert refusals("configmap-v1", carried) == []
    group["template"]["spec"]["containers"][0]["volumeMount"] = []
    assert refusals("podtemplatespec-v1", group["template"]) != []


def test_the_token_only_comes_from_a_secret() -> None:
    cluster, job = _documents().values()
    container = cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    variables = {each["name"]: each for each in container["env"]}
    assert variables["RAY_AUTH_TOKEN"]["valueFrom"] == {
        "secretKeyRef": {"name": "dapo-ray-token", "key": "auth_token"}
    }
    assert job["spec"]["rayClusterSpec"]["authOptions"] == {"mode": "token"}  # KubeRay creates it
    assert "RAY_AUTH_TOKEN" not in (DATA / "dapo-qwen3-32b-math.yaml").read_text()


def test_a_job_carries_its_recipe(tmp_path: Path) -> None:
    text = "# of mine\n" + Path("configs/arith_cpu.yaml").read_text().replace(
        "name: arith_cpu", "name: mine"
    )
    (tmp_path / "my recipe.yaml").write_text(text)
    inventory = _inventory(tmp_path, "hosts: [a, b]\ndevice: cpu\ndevices: 4")
    rendered = _render(inventory, "--kuberay", "--config", str(tmp_path / "my recipe.yaml"))
    carried, job = yaml.safe_load_all(rendered)
    assert carried["data"] == {"my-recipe.yaml": text}
    assert job["spec"]["entrypoint"].startswith("dapo run /etc/dapo/my-recipe.yaml --set ")
    head, worker = _pods(job)
    assert {"name": "recipe", "configMap": {"name": carried["metadata"]["name"]}} in head["volumes"]
    assert {"name": "recipe", "mountPath": "/etc/dapo"} in head["containers"][0]["volumeMounts"]
    assert "recipe" not in {volume["name"] for volume in worker["volumes"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "path", "is_there"),
    [
        ("custom_reward.path", "configs/rewards/finance_choice.py", True),  # docker/ copies configs
        ("custom_reward.path", "rewards/mine.py", False),
        ("custom_reward.path", "/store/mine.py", True),
        ("model.path", "/data/model", False),
        ("data.train", "/data/questions.parquet", False),
        ("data.train", "tests/data/rendered/alike.yaml", False),  # any existing file
        ("data.train", "dapo-math-17k", True),
        ("data.train", "hf:me/questions", True),
    ],
)
def test_a_file_that_is_missing_in_pods_is_named(key: str, path: str, is_there: bool) -> None:
    changes = ["--set", "model.path=/store/model", "--set", f"{key}={path}"]
    words = [f"{DATA}/alike.yaml", "--kuberay", "--config", RECIPE, *changes]
    assert (f"={path} is not in the pods" not in _remarks(*words)) == is_there
    assert (
        path not in "".join(line for line in _render(*words).splitlines() if line[:1] == "#")
    ) == is_there


def test_keys_that_pods_do_not_use_are_named(tmp_path: Path) -> None:
    text = (
        "hosts: [a, {name: b, interface: eth1}]\ndevices: 8\nuser: me\nproject: /x\nport: "
        "6400\nshell: ssh"
    )
    inventory = _inventory(tmp_path, text)
    said = _remarks(inventory, "--kuberay").strip()
    named = ["user (no command", "project (the image", "interface (Kubernetes", "port (KubeRay"]
    assert [each for each in named if each not in said] == []
    assert "shell" not in said  # its default
    assert said in _render(inventory, "--kuberay").replace("\n# ", " ")
    assert _remarks(inventory, "--scripts") == ""


def test_setup_runs_in_pods_before_ray(tmp_path: Path) -> None:
    text = "hosts: [a]\ndevices: 8\nsetup: |\n  . /etc/set_env.sh\n  . /etc/more.sh"
    text = _render(_inventory(tmp_path, text), "--kuberay")
    [pod] = _pods(yaml.safe_load(text))
    assert (
        "bash -c '. /etc/set_env.sh" in text
    )  # for kubectl exec, which lacks the variables of Ray's process
    for is_fine in (True, False):  # joined as KubeRay does
        (tmp_path / "set_env.sh").write_text("export A=1\n" if is_fine else "return 1\n")
        (tmp_path / "more.sh").write_text("return $((1 - ${A:-0}))\n")
        line = f"{pod['containers'][0]['args'][0]} && ulimit -n 64; echo starts $A"
        done = subprocess.run(
            ["bash", "-c", "--", line.replace("/etc/", f"{tmp_path}/")],
            capture_output=True,
            text=True,
            env={},
        )
        assert (done.stdout, done.returncode) == (("starts 1\n", 0) if is_fine else ("", 1)), done


@pytest.mark.parametrize("form", ["cluster", "job"])
def test_pods_wait_for_the_last_checkpoint(form: str) -> None:
    *_, document = yaml.safe_load_all(_render(*FORMS[form], "--set", "flow.stop_seconds=300"))
    pods = _pods(document)
    assert [pod["terminationGracePeriodSeconds"] for pod in pods] == [360, 360]
    for pod in pods:
        command = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command == ["python3", "-m", leave.__name__]
    variables = {each["name"]: each.get("value") for each in pods[0]["containers"][0]["env"]}
    assert variables.get("RAY_JOB_STOP_WAIT_TIME_S") == ("360" if form == "job" else None)


def test_pods_with_npus_mount_the_host_files_that_the_vendor_s_image_expects(
    tmp_path: Path,
) -> None:
    found = {}
    for hosts in ("[a]", "[a, b]"):
        rendered = _render(_inventory(tmp_path, f"hosts: {hosts}\ndevices: 8"), "--kuberay")
        for pod in _pods(yaml.safe_load(rendered)):
            of_host = {v["name"]: v["hostPath"]["path"] for v in pod["volumes"] if "hostPath" in v}
            mounted = {
                each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]
            }
            assert of_host.items() <= mounted.items()
            found[hosts] = set(of_host.values())
    alone = {
        "/usr/local/Ascend/driver",
        "/usr/local/dcmi",
        "/usr/local/bin/npu-smi",
        "/etc/ascend_install.info",
    }
    assert found == {"[a]": alone, "[a, b]": alone | {"/etc/hccn.conf"}}


@pytest.mark.parametrize("form", [("--scripts",), ("--slurm", "--config", RECIPE), ("--kuberay",)])
def test_a_secret_among_the_variables_is_a_warning(form: tuple[str, ...], tmp_path: Path) -> None:
    text = "hosts: [a]\ndevices: 64\nenv: {HF_TOKEN: hf_mine, HCCL_BUFFSIZE: 200}"
    said = _remarks(_inventory(tmp_path, text), *form)
    assert "env has HF_TOKEN, " in said
    assert "hf_mine" not in said


@pytest.mark.parametrize(
    ("inventory", "words", "message"),
    [
        ("devices: 16", [], "Invalid value: choose one of --scripts, --slurm and --kuberay"),
        ("devices: 16", ["--scripts", "--slurm"], "one of --scripts, --slurm and --kuberay"),
        ("devices: 16", ["--slurm"], "--slurm needs a recipe"),
        ("devices: 16", ["--scripts", "--site", "a=b"], "needs --slurm or --kuberay"),
        (
            "devices: 16",
            ["--kuberay", "--site", "imgae=b"],
            "the keys are image, claim, queue, cpu, memory, as KEY=VALUE",
        ),
        ("devices: 16", ["--slurm", "--config", RECIPE], "needs 64 NPU, but the inventory has 32"),
        (
            "devices: 64\ndevice: cuda",
            ["--kuberay", "--config", RECIPE],
            "train.device=npu, but the inventory has device=cuda",
        ),
        (
            "devices: 64",
            ["--kuberay", "--config", RECIPE, "--set", "run.name=Übung"],
            "Kubernetes rejects",
        ),
        (
            "devices: 64",
            ["--slurm", "--config", RECIPE, "--set", "flow.stop_seconds=65476"],
            "flow.stop_seconds=65476 is too long: SLURM signals a job at most 65475 s before",
        ),
        (
            "devices: 64\nhosts: [a, {name: b, devices: 8}]",
            ["--kuberay"],
            "devices is 8 for b and 64 for a",
        ),
        (
            "devices: 64\nhosts: [a, {name: b, interface: eth1}]",
            ["--slurm", "--config", RECIPE],
            "interface is eth1 for b and unset for a",
        ),
    ],
)
def test_contradictory_options_are_refused_with_the_key(
    inventory: str, words: list[str], message: str, tmp_path: Path
) -> None:
    hosts = "" if "hosts" in inventory else "hosts: [a, b]\n"
    done = CliRunner().invoke(
        app, ["cluster", "render", _inventory(tmp_path, f"{hosts}{inventory}"), *words]
    )
    assert done.exit_code != 0
    assert message in f"{done.output} {done.exception}"
