"""Inventories of SLURM, PBS and Volcano allocations."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dapo_core.errors import ConfigError
from tasks.nodes import scheduler
from tasks.nodes.inventory import Inventory
from tasks.nodes.scheduler import expand, from_scheduler


@st.composite
def _brackets(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A bracket and the numbers in it, each range padded with its own number of zeros."""
    texts, numbers = [], []
    for _ in range(draw(st.integers(1, 3))):
        first, length, width = (
            draw(st.integers(0, 1200)),
            draw(st.integers(0, 12)),
            draw(st.integers(1, 5)),
        )
        width = max(width, len(str(first)))
        texts.append(f"{first:0{width}}" + (f"-{first + length:0{width}}" if length else ""))
        numbers += [f"{number:0{width}}" for number in range(first, first + length + 1)]
    return f"[{','.join(texts)}]", numbers


@st.composite
def _items(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A name with up to two brackets, and the names that it expands to."""
    word = st.from_regex(r"[a-z][a-z0-9-]{0,5}[a-z]", fullmatch=True)
    text = draw(word)
    names = [text]
    for _ in range(draw(st.integers(0, 2))):
        bracket, numbers = draw(_brackets())
        end = draw(st.one_of(st.just(""), word))
        text += bracket + end
        names = [name + number + end for name in names for number in numbers]
    return text, names


@pytest.mark.slow
@given(st.lists(_items(), min_size=1, max_size=4))
def test_expansion_returns_the_compressed_names(items: list[tuple[str, list[str]]]) -> None:
    assert expand(",".join(text for text, _ in items)) == [
        name for _, names in items for name in names
    ]


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


def test_slurm_with_gpus() -> None:
    found = _slurm("gpu[01-02]", SLURM_GPUS_ON_NODE="8", PBS_NODEFILE="")
    assert (found.device, found.head_host.name, _devices(found)) == (
        "cuda",
        "gpu01",
        {"gpu01": 8, "gpu02": 8},
    )
    assert found.shell == "ssh"  # how SLURM tracks processes is unknown without scontrol


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({"SLURM_GPUS_PER_NODE": "a100:4"}, 4),
        ({"SLURM_GPUS_PER_NODE": "a100:4,h100:2"}, 6),
        ({"SLURM_JOB_GPUS": "0,2,4-7"}, 6),
        ({"SLURM_GPUS_PER_TASK": "1", "SLURM_TASKS_PER_NODE": "8(x2)"}, 8),
    ],
)
def test_slurm_counts_devices_in_several_forms(variables: dict[str, str], count: int) -> None:
    assert _devices(_slurm("n[1-2]", **variables)) == {"n1": count, "n2": count}


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
    for more in ("gres/npu:910c:16,gres/nvme:900", "gres/nic:2,gres/npu:16"):
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


def test_npus_are_counted_by_the_visible_devices() -> None:
    found = _slurm("x1", ASCEND_RT_VISIBLE_DEVICES="0,1,2,3")
    assert (found.device, _devices(found)) == ("npu", {"x1": 4})


def test_pbs(tmp_path: Path) -> None:
    nodes, gpus = tmp_path / "nodes", tmp_path / "gpus"
    nodes.write_text("b2\nb2\na1\na1\n")
    gpus.write_text("b2-gpu0\nb2-gpu1\na1-gpu0\na1-gpu1\n")
    cpu = from_scheduler({"PBS_NODEFILE": str(nodes), "PBS_JOBID": "9.head"})
    assert (cpu.device, cpu.shell, cpu.head_host.name, _devices(cpu)) == (
        "cpu",
        "ssh",
        "b2",
        {"b2": 2, "a1": 2},
    )
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
    assert [host.name for host in found.in_order] == [
        "job-master-0.job",
        "job-worker-0.job",
        "job-worker-1.job",
    ]
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
        ({"PBS_NODEFILE": "/nowhere/nodes"}, "/nowhere/nodes cannot be read"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "deploy/rayjob.yaml"),
    ],
)
def test_a_job_without_the_needed_variables_says_which(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_scheduler(environ)


def test_an_empty_node_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("\n")
    with pytest.raises(ConfigError, match="lists no node"):
        from_scheduler({"PBS_NODEFILE": str(tmp_path / "nodes")})


@pytest.mark.slow
def test_a_hanging_scontrol_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text("#!/bin/sh\nsleep 5\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/usr/bin{os.pathsep}/bin")
    monkeypatch.setattr(scheduler, "SCONTROL_SECONDS", 0.2)
    assert _devices(_slurm("n1", SLURM_GPUS_ON_NODE="2")) == {"n1": 2}


@pytest.mark.parametrize(
    ("said", "count"),
    [
        ("gres/gpu:v100:4,gres/nvme:900", 4),
        ("gres:gpu:4,gres:tmpfs:200G", 4),
        ("gres/nic:2,gres/npu:8", 8),
    ],
)
def test_only_devices_are_counted(monkeypatch: pytest.MonkeyPatch, said: str, count: int) -> None:
    monkeypatch.setattr(
        scheduler, "_scontrol", lambda *words: [f"JobId=7 TresPerNode={said}"] * ("job" in words)
    )
    monkeypatch.setattr(scheduler, "_kind_of_gpus", lambda: "cuda")
    assert _devices(_slurm("a,b")) == {"a": count, "b": count}
