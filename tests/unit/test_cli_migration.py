"""`dapo export-config`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dapo_core.errors import ConfigError
from flows.cli import app
from tasks.data.prepare import schema_of, write_rows
from tests.unit.test_interop_render import row

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MATH = str(CONFIGS / "dapo_qwen3_32b_math.yaml")
FOR_VERL = ("export-config", MATH, "--for", "verl")


def test_the_output_folder_has_every_file_of_the_script(tmp_path: Path) -> None:
    prepared = tmp_path / "prepared"
    prepared.mkdir()
    for name in ("train.parquet", "eval.parquet"):
        write_rows(
            iter([[row(0, "a", 1.0)]]), schema_of(iter([[row(0, "a", 1.0)]])), prepared / name
        )
    output = tmp_path / "out"
    done = CliRunner().invoke(app, [*FOR_VERL, "--output", str(output), "--data", str(prepared)])
    assert (done.exit_code, done.exception) == (0, None)
    assert {path.name for path in output.iterdir()} == {
        "run.sh",
        "reward_for_verl.py",
        "train.parquet",
        "eval.parquet",
    }
    script = (output / "run.sh").read_text()
    assert f"data.train_files={output}/train.parquet" in script
    assert "trainer.n_gpus_per_node=16" in script  # dies of an Atlas 800T A3
    assert "trainer.nnodes=4" in script
    assert "# Keys without an equivalent: sampler.gen_prompts." in script
    subprocess.run(["bash", "-n", str(output / "run.sh")], check=True)


def test_without_output_the_script_is_printed() -> None:
    done = CliRunner().invoke(app, [*FOR_VERL, "--trainer-version", "0.9.0"])
    assert done.stdout.startswith(
        "#!/usr/bin/env bash\n# dapo_qwen3_32b_math of dapo-pipeline for verl"
    )
    assert "--output writes reward_for_verl.py." in done.stdout
    assert (
        "trainer.n_gpus_per_node=8" in CliRunner().invoke(app, [*FOR_VERL, "--nodes", "8"]).stdout
    )
    assert "verl has no equivalent for sampler.gen_prompts" in done.stderr
    changed = CliRunner().invoke(app, [*FOR_VERL, "--set", "sampler.max_staleness=1"])
    assert "verl has no equivalent for sampler.gen_prompts, sampler.max_staleness" in changed.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("export-config", str(CONFIGS / "arith_cpu.yaml"), "--for", "verl"), "--model"),
        (
            (*FOR_VERL, "--trainer-version", "0.4.0"),
            r"verl 0\.4\.0 is not supported; use one of 0\.5\.0",
        ),
        ((*FOR_VERL, "--nodes", "3"), r"external\.num_nodes=3 does not divide the 64 devices"),
        (
            (*FOR_VERL, "--set", "train.device=cpu"),
            r"train\.device=cpu: verl trains on cuda and npu",
        ),
    ],
)
def test_an_impossible_export_is_refused_with_the_key(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_environment_variables_are_exported_without_secrets(tmp_path: Path) -> None:
    own = "external.env={HF_TOKEN: $MY_TOKEN, NOTE: 'a b', NCCL_DEBUG: WARN}"
    script = (
        CliRunner().invoke(app, [*FOR_VERL, "--set", "train.backend=verl", "--set", own]).stdout
    )
    exports = [line for line in script.splitlines() if line.startswith("export ")]
    assert exports[-3:] == [
        'export HF_TOKEN="$MY_TOKEN"',
        "export NOTE='a b'",
        "export NCCL_DEBUG=WARN",
    ]


def test_data_must_be_an_output_of_prepare_data(tmp_path: Path) -> None:
    words = [*FOR_VERL, "--output", str(tmp_path / "out"), "--data", str(tmp_path)]
    with pytest.raises(
        ConfigError, match=r"has no train\.parquet; pass an output of dapo prepare-data"
    ):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_an_edited_script_is_not_overwritten(tmp_path: Path) -> None:
    words = [*FOR_VERL, "--output", str(tmp_path / "out")]
    script = tmp_path / "out/run.sh"
    for _ in range(2):  # the same again is no edit
        assert CliRunner().invoke(app, words).exit_code == 0
    script.write_text("mine")
    with pytest.raises(
        ConfigError, match=r"out already has run\.sh with different content; name another"
    ):
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert script.read_text() == "mine"
