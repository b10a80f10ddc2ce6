"""Inventories of SLURM, PBS and Volcano allocations."""

import os
import re
from pathlib import Path

import pytest

from dapo_core.errors import ConfigError
from tasks.nodes import scheduler
from tasks.nodes.inventory import Inventory
from tasks.nodes.scheduler import expand, from_scheduler


def test_expansion_equals_scontrol_s() -> None:
    """Recorded from `scontrol show hostnames` of SLURM 22.05."""
    assert expand("a[01-03,7],b5") == ["a01", "a02", "a03", "a7", "b5"]
    assert expand("r[1-2]n[01-02],x") == ["r1n01", "r1n02", "r2n01", "r2n02", "x"]
    assert expand("a[08,9-10]") == ["a08", "a9", "a10"]
    assert expand("n[098-101]-ib,gpu-x") == ["n098-ib", "n099-ib", "n100-ib", "n101-ib", "gpu-x"]


@pytest.fixture(autouse=True)
def _no_scontrol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def _devices(inventory: Inventory) -> dict[str, int]:
    return {host.name: inventory.devices_of(host) for host in inventory.hosts}


def _slurm(nodes: str, **variables: str) -> Inventory:
    return from_scheduler({"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes, **variables})


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"SLURM_GPUS_ON_NODE": "8", "PBS_NODEFILE": ""}, 8),
        ({"SLURM_GPUS_PER_NODE": "a100:4,h100:2"}, 6),
        ({"SLURM_JOB_GPUS": "0,2,4-7"}, 6),
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_TASKS_PER_NODE": "8(x2)"}, 8),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0,1,2,3"}, 4),
    ],
)
def test_devices_of_slurm_are_counted_in_each_form(variables: dict[str, str], count: int) -> None:
    found = _slurm("n[1-2]", **variables)
    assert found.device == ("npu" if "ASCEND_RT_VISIBLE_DEVICES" in variables else "cuda")
    assert _devices(found) == {"n1": count, "n2": count}
    assert found.shell == "ssh"  # how SLURM tracks processes is unknown without scontrol


def test_slurm_without_devices_uses_each_node_s_cpus() -> None:
    found = _slurm("c[1-3]", SLURM_JOB_CPUS_PER_NODE="72(x2),36")
    assert (found.device, _devices(found)) == ("cpu", {"c1": 72, "c2": 72, "c3": 36})


def test_slurm_prefers_scontrol(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No variable has a site's own resource of NPUs; scontrol prints it, and the names."""
    script = tmp_path / "scontrol"
    script.write_text(
        "#!/bin/sh\n"
        '[ "$2" = hostnames ] && printf "x1\\nx2\\n"\n'
        '[ "$2" = config ] && echo "ProctrackType           = proctrack/linuxproc"\n'
        '[ "$2" = job ] && echo "JobId=7 TRES=cpu=384,gres/npu=32 TresPerNode=gres/npu:910c:16 '
        'Network=(null)"\n'
        "exit 0\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    found = _slurm("x[1-2]")
    assert (found.device, _devices(found)) == ("npu", {"x1": 16, "x2": 16})
    command = found.command(found.hosts[1], "echo a b")
    assert command[0] == "srun"
    assert command[-4:] == ["--nodelist=x2", "sh", "-c", "echo a b"]
    for more in ("gres/npu:910c:16,gres/nvme:900", "gres/nic:2,gres/npu:16", "gres:npu:16"):
        script.write_text(re.sub("TresPerNode=[^ ]*", f"TresPerNode={more}", script.read_text()))
        found = _slurm("x[1-2]")
        assert (found.device, _devices(found)) == ("npu", {"x1": 16, "x2": 16}), more
    script.write_text(script.read_text().replace("linuxproc", "cgroup"))
    assert _slurm("x[1-2]").shell == "ssh"


def test_setup_sources_cann_over_ssh(tmp_path: Path) -> None:
    home = tmp_path / "Ascend kit" / "latest"
    home.mkdir(parents=True)
    (home.parent / "set_env.sh").touch()
    found = _slurm("x1", ASCEND_RT_VISIBLE_DEVICES="0", ASCEND_TOOLKIT_HOME=str(home))
    assert found.setup == f". '{home.parent}/set_env.sh'"
    assert _slurm("x1", ASCEND_RT_VISIBLE_DEVICES="0").setup is None


def test_pbs(tmp_path: Path) -> None:
    nodes, gpus = tmp_path / "nodes", tmp_path / "gpus"
    nodes.write_text("b2\nb2\na1\na1\n")
    gpus.write_text("b2-gpu0\nb2-gpu1\na1-gpu0\na1-gpu1\n")
    cpu = from_scheduler({"PBS_NODEFILE": str(nodes), "PBS_JOBID": "9.head"})
    assert (cpu.device, cpu.shell, cpu.head_host.name) == ("cpu", "ssh", "b2")
    assert _devices(cpu) == {"b2": 2, "a1": 2}
    cuda = from_scheduler({"PBS_NODEFILE": str(nodes), "PBS_GPUFILE": str(gpus)})
    assert (cuda.device, _devices(cuda)) == ("cuda", {"b2": 2, "a1": 2})


def test_volcano(monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.recipes.first_recipe import Machine

    monkeypatch.setattr(Machine, "this", lambda: Machine("npu", 16, 192))
    environ = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "VC_WORKER_HOSTS": "job-worker-0.job,job-worker-1.job",
        "VC_MASTER_HOSTS": "job-master-0.job",
        "VC_WORKER_NUM": "2",
    }
    found = from_scheduler(environ)
    names = ["job-master-0.job", "job-worker-0.job", "job-worker-1.job"]
    assert [host.name for host in found.in_order] == names
    assert (found.device, found.num_devices) == ("npu", 48)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "not inside a scheduler's job"),
        ({"SLURM_JOB_ID": "7"}, "SLURM_JOB_NODELIST is not set"),
        (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_GPUS_PER_NODE": "a100"},
            "not a number of devices",
        ),
        (
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_HET_SIZE": "2"},
            "SLURM_JOB_NODELIST=n1 has the nodes of its first component only",
        ),
        ({"PBS_NODEFILE": "/nowhere/nodes"}, "/nowhere/nodes cannot be read"),
        ({"PBS_NODEFILE": os.devnull}, "lists no node"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "deploy/rayjob.yaml"),
    ],
)
def test_a_job_without_the_needed_variables_says_which(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_scheduler(environ)


@pytest.mark.slow
def test_a_hanging_scontrol_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\nsleep 5\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(scheduler, "SCONTROL_SECONDS", 0.2)
    assert _devices(_slurm("n1", SLURM_GPUS_ON_NODE="2")) == {"n1": 2}
