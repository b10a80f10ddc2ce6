"""The files in deploy/: their readers accept them, and the command line accepts their commands."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.version import Version
from prefect.settings import Settings
from sqlalchemy.engine import make_url

from flows.cli import app
from flows.config import load_config
from tasks.config import ChainConfig
from tasks.preflight.environment import wanted_alike

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SYSTEMD = shutil.which("systemd-analyze")
SHELLCHECK = shutil.which("shellcheck")


@pytest.mark.skipif(SYSTEMD is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units_without_warnings(tmp_path: Path) -> None:
    """systemd only warns about a misspelt key and ignores it; a missing program is an error."""
    project = tmp_path / "dapo-pipeline"  # the clone's location in the units
    (project / ".venv" / "bin").mkdir(parents=True)
    (project / ".venv" / "bin" / "prefect").symlink_to(Path(sys.executable).parent / "prefect")
    (project / "deploy").symlink_to(DEPLOY)
    done = subprocess.run(
        [str(SYSTEMD), "--user", "verify", *map(str, sorted(DEPLOY.glob("*.service")))],
        env={**os.environ, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_any_password_works_for_the_compose_database(monkeypatch: pytest.MonkeyPatch) -> None:
    password = "p@ss:/%40+ #?"
    server = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"][
        "server"
    ]
    for name, value in server["environment"].items():
        monkeypatch.setenv(name, value.replace("${DAPO_PASSWORD}", password))
    found = Settings().server.database.connection_url
    assert found is not None
    url = make_url(found.get_secret_value())
    assert (url.drivername, url.host, url.database) == ("postgresql+asyncpg", "database", "dapo")
    assert (url.username, url.password) == ("dapo", password)


def parsed(line: str) -> dict[str, Any]:
    """The values of a `dapo` command line, as the real command reads them."""
    command: Any = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    while words and hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    values: dict[str, Any] = command.make_context(line, words).params
    return values


def recipe_of(line: str) -> ChainConfig:
    """The recipe that a `dapo run` line names, with its overrides."""
    values = parsed(line)
    return load_config(ROOT / values["config"], values["overrides"])


def test_the_batch_script_is_valid_and_asks_for_the_recipe_s_devices() -> None:
    path = DEPLOY / "slurm.sbatch"
    subprocess.run(["bash", "-n", path], check=True)
    if SHELLCHECK is not None:
        done = subprocess.run([SHELLCHECK, "-e", "SC1091", path], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, "")
    text = path.read_text()
    lines = re.findall(r"^(?:trap ')?(dapo [^'&#\n]+)", text, re.MULTILINE)
    assert [" ".join(line.split()[:3]) for line in lines[:2]] == [
        "dapo cluster down",
        "dapo cluster up",
    ]
    for line in lines[:2]:
        assert parsed(line)["inventory"] is None
    config = recipe_of(lines[2])
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.+)", text, re.MULTILINE))
    resource, _, count = options["gres"].rpartition(":")
    assert resource == config.train.device
    assert int(options["nodes"]) * int(count) == config.num_devices
    assert config.train.ray_address == "auto"
    assert options["signal"] == f"B:TERM@{config.flow.stop_seconds + 60:g}"


def test_the_ray_job_starts_as_many_devices_as_its_recipe_needs_and_stops_cleanly() -> None:
    job = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,45}[a-z0-9])?", job["metadata"]["name"])
    config = recipe_of(job["spec"]["entrypoint"])
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert Version(cluster["rayVersion"]) >= Version("2.52")  # the first with tokens
    [workers] = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    [resources] = shlex.split(cluster["headGroupSpec"]["rayStartParams"]["resources"])
    count = json.loads(resources)["NPU"]
    assert (1 + workers["replicas"]) * count == config.num_devices
    for group in (cluster["headGroupSpec"], workers):
        assert group["rayStartParams"] == cluster["headGroupSpec"]["rayStartParams"]
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        assert container["resources"]["limits"]["huawei.com/Ascend910"] == count
        mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
        assert mounts.keys() == {each["name"] for each in pod["volumes"]}
        assert mounts["store"] == config.store.path
        assert config.model.path.startswith(f"{mounts['store']}/")
        variables = {each["name"]: each["value"] for each in container["env"]}
        seconds = f"{config.flow.stop_seconds + 60:g}"
        assert variables.pop("RAY_JOB_STOP_WAIT_TIME_S") == seconds
        assert variables == wanted_alike(config)
        assert pod["terminationGracePeriodSeconds"] == int(seconds)
        hook = container["lifecycle"]["preStop"]["exec"]["command"]
        assert hook == ["python3", "-m", "tasks.nodes.leave"]
