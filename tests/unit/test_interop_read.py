"""Reading scripts, YAML and Hydra overrides; the override grammar is compared with Hydra itself."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from interop import ForeignConfigError
from interop.foreign_config import Setting
from interop.hydra import setting_of, settings_of_yaml
from interop.read import read_files
from tests.verl_wheels import folder_with

PACKAGES = ("hydra-core==1.3.2", "omegaconf==2.3.1", "antlr4-python3-runtime==4.9.3")
HYDRA = """
import json, sys
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import QuotedString
def plain(value):
    if isinstance(value, QuotedString): return value.text
    if isinstance(value, list): return [plain(each) for each in value]
    if isinstance(value, dict): return {plain(key): plain(each) for key, each in value.items()}
    return value
parser, results = OverridesParser.create(), []
for text in json.load(sys.stdin):
    try:
        override = parser.parse_override(text)
        sweep = override.is_sweep_override()
        key = override.get_key_element().lstrip("+~")
        value = repr(plain(override._value))
        results.append("refused" if sweep else [key, value])
    except Exception:
        results.append("refused")
print(json.dumps(results))
"""
WORDS = r"""
a b-c 1 0 01 1e-6 -1.5 .5 2. true NULL inf 1_0 , : = [ ] { } ' " \ \, \' ${a.b} $ / + # ü % * @ |
['a','b'] {a:1,b:[c,d]} 'it\'s' "q" '' [] {} ${oc.env:X,1}
"""
ATOMS = [*WORDS.split(), " ", "\t", "[1, 2 ,3]", "{ x : y }"]
KEYS = ("a", "+a.b", "++a_1.0.c", "~a", "a/b", "a@p", "$x", "1a", "a-b.c")


def ours_of(text: str) -> Any:
    try:
        key, value, _ = setting_of(text)
    except ForeignConfigError:
        return "refused"
    return [key, repr(value)]


@pytest.mark.slow
def test_overrides_are_parsed_like_hydra() -> None:
    random = Random(0)
    texts = [
        random.choice(KEYS)
        + random.choice(("=", "=", "=", " =", "= ", ""))
        + "".join(random.choices(ATOMS, k=count % 5))
        for count in range(3000)
    ]
    done = subprocess.run(
        [sys.executable, "-c", HYDRA],
        input=json.dumps(texts),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(folder_with("hydra", *PACKAGES))},
    )
    assert done.returncode == 0, done.stderr
    for text, theirs in zip(texts, json.loads(done.stdout), strict=True):
        if not text.endswith(("] ", "} ", "]\t", "}\t")):  # Hydra wants nothing after a bracket
            assert ours_of(text) == theirs, text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=['console','wandb']", ["console", "wandb"]),
        ("a=[console,wandb]", ["console", "wandb"]),
        ("a=~/verl/x.parquet", "~/verl/x.parquet"),  # from $HOME; Hydra itself needs quotes
        ("a=0.99_1.01", "0.99_1.01"),
        ("a=1e-6", 1e-6),
        ("+a={x:null,y:[1,2.5,True]}", {"x": None, "y": [1, 2.5, True]}),
        ("a=${data.train_batch_size}", "${data.train_batch_size}"),
    ],
)
def test_override_values_have_types(text: str, value: object) -> None:
    assert setting_of(text).value == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=b,c", "is a sweep, that is, several trainings; write a list as \\[a,b\\]"),
        ("a=choice(1,2)", "functions and sweeps"),
        ("a=b=c", "cannot parse '=c' at character 4; quote the value"),
        ("a=[b", "cannot parse ''"),
        ("a.b", "is not KEY=VALUE"),
    ],
)
def test_invalid_overrides_are_refused(text: str, message: str) -> None:
    with pytest.raises(ForeignConfigError, match=message):
        setting_of(text)


def test_yaml_settings_have_their_lines() -> None:
    text = (
        "defaults: [ppo_trainer]\nactor:\n  optim:\n    lr: 1e-6  # 率\n  x: {}\n  y: [1]\na: "
        "10.0.0.1:9\n"
    )
    assert [tuple(setting) for setting in settings_of_yaml(text, "f.yaml")] == [
        ("defaults", ["ppo_trainer"], "f.yaml:1"),
        ("actor.optim.lr", 1e-6, "f.yaml:4"),
        ("actor.x", {}, "f.yaml:5"),
        ("actor.y", [1], "f.yaml:6"),
        ("a", "10.0.0.1:9", "f.yaml:7"),
    ]
    assert [tuple(setting) for setting in settings_of_yaml("- a.b=1\n- +c=[x]\n", "o.yaml")] == [
        ("a.b", 1, "o.yaml:1"),
        ("c", ["x"], "o.yaml:2"),
    ]


def write(folder: Path, text: str | bytes, name: str = "run.sh") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


MAIN = "python3 -m verl.trainer.main_ppo"


TWO = "data.train_batch_size=8 trainer.nnodes=2"
RUN = f"{MAIN} {TWO}"


@pytest.mark.parametrize(
    "text",
    [
        f"{RUN}",
        f"nohup {RUN} > log 2>&1 &",
        f"ray job submit --address=http://h:8265 --runtime-env=r.yaml -- {RUN}",
        f"ray job submit -- bash -c '{RUN}'",
        f"bash -c '{RUN}'",
        f"torchrun --nproc_per_node=8 my/train.py {TWO} | tee log",
        f"srun --nodes=2 uv run python -m recipe.mine.main {TWO}",
        f"srun --label bash -c 'set -x; exec {RUN} 2>&1 | tee log'",
        f"cd /x && PYTHONUNBUFFERED=1 {MAIN} --config-path=config --config-name='ppo_trainer' "
        f"{TWO}",
        f"docker exec -it c bash -c '{RUN}'",
        f"docker run --entrypoint bash image -c '{RUN}'",
        f'apptainer exec --nv i.sif bash -lc "{RUN}"',
        f'ssh -p 22 node "cd x && {RUN}"',
        f"bash -c \"ssh node '{RUN}'\"",
        f'tmux send-keys -t s "{RUN}" Enter',
        f'sbatch --wrap="{RUN}"',
        f"cat <<EOF | bash\n{RUN}\nEOF",
        f"cat <<'EOF' | ssh node bash -s\n{RUN}\nEOF",
        f"sbatch <<EOF\n#SBATCH -N 2\nsrun {RUN}\nEOF",
        f'bash <<< "{RUN}"',
        f'echo "{RUN}" | bash',
        f"sudo -E env A=b {RUN}",
        f"CMD='{RUN}'\necho $CMD\neval $CMD",
        f"$PY -m verl.trainer.main_ppo {TWO}",
        f"python -m debugpy --listen 5678 verl/trainer/main_ppo.py {TWO}",
    ],
)
def test_a_training_is_found_behind_launchers(tmp_path: Path, text: str) -> None:
    reading = read_files([write(tmp_path, f"#!/bin/bash\n{text}\n")])
    assert [setting[:2] for setting in reading.settings] == [
        ("data.train_batch_size", 8),
        ("trainer.nnodes", 2),
    ]
    assert reading.trainer == "verl"


@pytest.mark.parametrize(
    "text",
    [
        f"CMD='{RUN}'\necho $CMD",
        f"echo {RUN} | tee cmd.txt",
        f"cat <<EOF\nusage: {RUN}\nEOF",
        f"cat > other.sh <<EOF\n{RUN}\nEOF",
        "cp verl/trainer/main_ppo.py /tmp",
        "grep -n python verl/trainer/main_ppo.py",
        "sed -i s/a/b/ cli/train_grpo.py",
        "[ -f cli/train_grpo.py ] && diff cli/train_grpo.py x",
        "pkill -f 'python3 -m verl.trainer.main_ppo'",
        "docker cp verl/trainer/main_ppo.py c:/x",
        "python -m py_compile verl/trainer/main_ppo.py",
        "python3 -m compileall verl/trainer/main_ppo.py cli/train_grpo.py",
        "python tools/check.py verl/trainer/main_ppo.py",
        "python -c 'import verl.trainer.main_ppo'",
    ],
)
def test_a_command_that_only_names_the_trainer_is_no_training(tmp_path: Path, text: str) -> None:
    with pytest.raises(ForeignConfigError, match="no training found"):
        read_files([write(tmp_path, text)])


@pytest.mark.parametrize("path", ["/data/$", '"/data/$"'])
def test_a_value_that_lost_its_variable_is_refused_by_line(tmp_path: Path, path: str) -> None:
    text = f"M={path}\n{RUN} trainer.project_name='x$' actor_rollout_ref.model.path=$M\n"
    with pytest.raises(ForeignConfigError, match=r"1 value .*\n.*:1, no variable's name follows"):
        read_files([write(tmp_path, text)])
    found = read_files([write(tmp_path, text)], {"$": "x"}).settings
    assert {setting.key: setting.value for setting in found}["trainer.project_name"] == "x$"


def test_variables_before_the_trainer_are_its_environment(tmp_path: Path) -> None:
    reading = read_files([write(tmp_path, f"export B=1\nenv A=b docker exec -e C=d c {RUN}")])
    assert reading.environment == {"A": "b", "B": "1", "C": "d"}


def test_names_and_logs_need_no_value_of_the_scripts_machine(tmp_path: Path) -> None:
    text = (
        f"NOW=$(date +%F)\n{RUN} trainer.experiment_name=dapo-$NOW-$(hostname) "
        "trainer.project_name=$(whoami) trainer.default_local_dir=/c/$(hostname) "
        "data.train_files=$(pwd)/a.parquet 2>&1 | tee $NOW.log \\\n"
    )
    reading = read_files([write(tmp_path, text)])
    found = {setting.key: setting.value for setting in reading.settings}
    assert found["trainer.experiment_name"] == "dapo"
    assert found["trainer.project_name"] == "run"
    assert found["trainer.default_local_dir"] == "/c/$(hostname)"
    assert found["data.train_files"] == "./a.parquet"
    assert "run.sh:2: trainer.project_name=$(whoami) becomes run: the rest is unknown here" in (
        reading.notes
    )


@pytest.mark.parametrize(
    ("name", "start", "has_npus", "why"),
    [
        ("run_npu_8b.sh", "", False, "the name run_npu_8b.sh:"),
        ("run.sh", "export HCCL_BUFFSIZE=300\n", False, "the script sets HCCL_BUFFSIZE:"),
        ("run.sh", "", True, "this machine has NPUs:"),
        ("input.sh", "ASCEND=1\nD=a.b=1\n", False, None),
        ("run_npu.sh", "D=trainer.device=cuda\n", True, "run_npu.sh:2"),
    ],
)
def test_a_script_for_npus_gives_their_device(
    tmp_path: Path, name: str, start: str, has_npus: bool, why: str | None
) -> None:
    path = write(tmp_path, f"{start}{RUN} $D", name)
    given = {} if "D=" in start else {"D": ""}
    reading = read_files([path], given, has_npus=has_npus)
    found = [each for each in reading.settings if each.key == "trainer.device"]
    expected = "cuda" if "cuda" in start else "npu"
    assert found == ([] if why is None else [Setting("trainer.device", expected, why)])


@pytest.mark.parametrize("change", ["crlf", "bom", "gb18030"])
def test_other_encodings_and_line_ends_are_read(tmp_path: Path, change: str) -> None:
    text = (
        f"# 修改为模型路径\nN=$((2 * 4))\nset -x\n{MAIN} \\\n  data.train_batch_size=$N \\\n  "
        "trainer.nnodes=2\n"
    )
    content = {
        "crlf": text.replace("\n", "\r\n").encode(),
        "bom": b"\xef\xbb\xbf" + text.encode(),
        "gb18030": text.encode("gb18030"),
    }[change]
    reading = read_files([write(tmp_path, content)])
    assert [tuple(setting) for setting in reading.settings] == [
        ("data.train_batch_size", 8, "run.sh:5"),
        ("trainer.nnodes", 2, "run.sh:6"),
    ]


def test_all_unknown_values_are_reported_at_once(tmp_path: Path) -> None:
    text = f"""MODEL=${{MODEL:-$(realpath .)/Qwen}}
NOW=$(date +%s)
{MAIN} actor_rollout_ref.model.path=$MODEL/hf data.train_files=$DATA/a.parquet \\
  trainer.default_local_dir=ckpts/$DATA actor_rollout_ref.rollout.n=$(nproc) 2>&1 | tee $NOW.log
"""
    path = write(tmp_path, text)
    with pytest.raises(ForeignConfigError) as caught:
        read_files([path])
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 values known only on the script's machine; give each with --set-env:"
    assert lines[1].startswith(
        "  --set-env MODEL=...  run.sh:1, from $(realpath .); affects actor_rollout_ref.model.path "
        "(run.sh:3)"
    )
    assert lines[2] == (
        "  --set-env DATA=...  run.sh:3, not set by the script; affects data.train_files (run.sh:3)"
    )
    assert lines[3].startswith("  --set-env '$(nproc)=...'  run.sh:4, a command's output")
    reading = read_files([path], {"MODEL": "/m", "DATA": "/d", "$(nproc)": "8"})
    assert [setting.value for setting in reading.settings] == [
        "/m/hf",
        "/d/a.parquet",
        "ckpts//d",
        8,
    ]
    with pytest.raises(ForeignConfigError, match=r"--set-env OTHER: not used in run.sh"):
        read_files([path], {"MODEL": "/m", "DATA": "/d", "$(nproc)": "8", "OTHER": "1"})


def test_several_trainings_and_none(tmp_path: Path) -> None:
    text = (
        f"for lr in 1e-6 5e-6; do\n  {MAIN} actor_rollout_ref.actor.optim.lr=$lr "
        "data.train_batch_size=4\ndone\n"
    )
    path = write(tmp_path, text)
    with pytest.raises(
        ForeignConfigError,
        match=r"found 2 trainings; select one with FILE#N:\n  1\. run.sh:2: python3 -m",
    ):
        read_files([path])
    assert read_files([path], training=2).settings[0].value == 5e-6
    with pytest.raises(ForeignConfigError, match="no training 3: found 2"):
        read_files([path], training=3)
    none = write(
        tmp_path, 'if [ $# -lt 2 ]; then echo usage; exit 1; fi\nbash other.sh "$@"\n', "start.sh"
    )
    with pytest.raises(
        ForeignConfigError,
        match=r"looked for a command such as(.|\n)*the script exits at start.sh:1",
    ):
        read_files([none])
    with pytest.raises(ForeignConfigError, match=r"start.sh:2 runs other.sh: give that file"):
        read_files([none], {"1": "a", "2": "b"})
    other = write(
        tmp_path, f"{MAIN} data.train_batch_size=$1 trainer.nnodes=${{N:-1}}\n", "other.sh"
    )
    both = read_files([none, other], {"1": "16", "2": "b"})
    assert tuple(both.settings[0]) == ("data.train_batch_size", 16, "other.sh:1")


def test_a_broken_line_continuation_is_reported(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f"{MAIN} data.train_batch_size=4 \\ \n  trainer.nnodes=2 \\\n  trainer.save_freq=1\n",
    )
    with pytest.raises(
        ForeignConfigError, match=r"run.sh:2: 'trainer.nnodes=2' is read as a separate command"
    ):
        read_files([path])


def test_the_command_line_overrides_configurations(tmp_path: Path) -> None:
    config = write(tmp_path, "data:\n  train_batch_size: 4\n  seed: ${oc.env:SEED}\n", "mine.yaml")
    script = write(
        tmp_path, f"{MAIN} --config-name mine data.max_prompt_length=64 data.train_batch_size=8\n"
    )
    reading = read_files([script, config], {"SEED": "3"})
    assert [(setting.key, setting.value) for setting in reading.settings] == [
        ("data.train_batch_size", 4),
        ("data.seed", "3"),
        ("data.max_prompt_length", 64),
        ("data.train_batch_size", 8),
    ]
    with pytest.raises(ForeignConfigError, match="give each: --set-env SEED="):
        read_files([config])
    assert [setting.key for setting in read_files([config], {"SEED": "3"}).settings] == [
        "data.train_batch_size",
        "data.seed",
    ]
    assert read_files([script]).notes == [
        "run.sh:1: configuration mine is not among the given files; its values are not read"
    ]


def test_a_here_document_is_read_as_configuration(tmp_path: Path) -> None:
    text = f"""BATCH=32
cat <<EOF > conf/mine.yaml
data:
  train_batch_size: $BATCH
EOF
{MAIN} --config-path conf --config-name=mine data.max_prompt_length=64 trainer.nnodes=1
"""
    reading = read_files([write(tmp_path, text)])
    assert [setting[:2] for setting in reading.settings][:2] == [
        ("data.train_batch_size", 32),
        ("data.max_prompt_length", 64),
    ]
