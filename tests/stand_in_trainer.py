"""A small trainer that stands for verl: same command line, files, console lines and checkpoints; no
GPU.

It reads the rows and the reward file that were rendered for it, takes an optimizer step on real
prompts with a real model, and writes what verl's FSDP workers write. `install` makes an environment
in which `python -m verl.trainer.main_ppo` is this. The variable STAND_IN tells it what to do at a
step, once: `crash:3`, `hang:2`, `typo:1`, `quit:2`; with `light` among its words it writes empty
files in place of weights, in a tenth of the time.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEPS_SECONDS = 0.05
LEARNING_RATE = 0.05


def install(folder: Path, version: str = "0.9.1") -> dict[str, str]:
    """The value of external.env with which this interpreter has this trainer as verl of that
    version.
    """
    package = folder / "verl" / "trainer"
    package.mkdir(parents=True)
    for place in (package.parent, package):
        (place / "__init__.py").touch()
    (package / "main_ppo.py").write_text(f"import sys\nsys.path.append({str(ROOT)!r})\n" + _RUN)
    merger = folder / "verl" / "model_merger"
    merger.mkdir()
    (merger / "__init__.py").touch()
    (merger / "__main__.py").write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\n" + _RUN.replace("main", "merge")
    )
    info = folder / f"verl-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: verl\nVersion: {version}\n")
    return {"PYTHONPATH": str(folder)}


_RUN = "from tests.stand_in_trainer import main\nmain(sys.argv[1:])\n"


def say(text: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(words: list[str]) -> None:
    """Train as the overrides say."""
    config = {name.lstrip("+"): value for name, _, value in (word.partition("=") for word in words)}
    folder = Path(config["trainer.default_local_dir"])
    total, every = int(config["trainer.total_training_steps"]), int(config["trainer.save_freq"])
    orders = os.environ.get("STAND_IN", "").split()
    is_light = "light" in orders
    newest = folder / "latest_checkpointed_iteration.txt"
    start = (
        int(newest.read_text())
        if config["trainer.resume_mode"] == "auto" and newest.exists()
        else 0
    )
    say(f"Found checkpoint: global_step_{start}" if start else "Training from scratch")
    scores = score(config)
    trainer = (
        None if is_light else Model(config, folder / f"global_step_{start}" if start else None)
    )
    for step in range(start + 1, total + 1):
        obey(orders, step, start)
        time.sleep(STEPS_SECONDS)
        loss = 0.0 if trainer is None else trainer.learn(step)
        if step % every == 0 or step == total:
            actor = folder / f"global_step_{step}" / "actor"
            actor.mkdir(parents=True, exist_ok=True)
            if trainer is None:
                (actor / "model_world_size_1_rank_0.pt").touch()
            else:
                trainer.save(actor)
            newest.write_text(str(step))
            if (most := config["trainer.max_actor_ckpt_to_keep"]) != "null":
                for old in range(every, step - (int(most) - 1) * every, every):
                    shutil.rmtree(folder / f"global_step_{old}" / "actor", ignore_errors=True)
        numbers = {
            "critic/score/mean": scores[0],
            "critic/score/max": scores[1],
            "actor/pg_loss": loss,
            "response_length/mean": 8.0 + step,
            "timing_s/step": STEPS_SECONDS,
            "training/global_step": step,
        }
        line = " - ".join([f"step:{step}", *(f"{name}:{value}" for name, value in numbers.items())])
        say(f"\x1b[36m(TaskRunner pid={os.getpid()})\x1b[0m {line}")
        say(f"Training Progress: {step}/{total}")


def obey(orders: list[str], step: int, start: int) -> None:
    """Do what STAND_IN says of this step, unless a checkpoint was continued."""
    if start:
        return
    if f"hang:{step}" in orders:
        say("stuck")
        time.sleep(600)
    if f"crash:{step}" in orders:
        raise RuntimeError(f"NCCL error in step {step}")
    if f"typo:{step}" in orders:
        raise KeyError("rollout.modee")
    if f"quit:{step}" in orders:
        sys.exit(0)


def score(config: dict[str, str]) -> tuple[float, float]:
    """Mean and largest score that the rendered reward file gives a right and an empty answer to the
    first row.
    """
    import pyarrow.parquet as pq

    row = pq.read_table(config["data.train_files"]).slice(0, 1).to_pylist()[0]
    spec = importlib.util.spec_from_file_location(
        "reward", config["reward.custom_reward_function.path"]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    compute_score: Any = getattr(module, config["reward.custom_reward_function.name"])
    gold = row["reward_model"]["ground_truth"]
    found = [
        compute_score(
            data_source=row["data_source"],
            solution_str=text,
            ground_truth=gold,
            extra_info=row["extra_info"],
        )["score"]
        for text in (f"\\boxed{{{gold}}} Answer: {gold}", "")
    ]
    return sum(found) / len(found), max(found)


class Model:
    """The policy, sharded by FSDP2 over one rank."""

    def __init__(self, config: dict[str, str], checkpoint: Path | None) -> None:
        import pyarrow.parquet as pq
        import torch
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)
        self.folder = Path(config["actor_rollout_ref.model.path"])
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        self.model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)
        fully_shard(self.model, mesh=mesh)
        if checkpoint is not None:
            path = checkpoint / "actor" / "model_world_size_1_rank_0.pt"
            self.model.load_state_dict(torch.load(path, weights_only=False))
        tokenizer: Any = AutoTokenizer.from_pretrained(self.folder)
        rows = pq.read_table(config["data.train_files"]).slice(0, 64).to_pylist()
        self.batches = [
            tokenizer(
                row["prompt"][0]["content"] + row["reward_model"]["ground_truth"],
                return_tensors="pt",
            ).input_ids
            for row in rows
        ]

    def learn(self, step: int) -> float:
        """The loss before a step of gradient descent on one row, which the step's number names."""
        import torch

        ids = self.batches[step % len(self.batches)]
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        with torch.no_grad():
            for weight in self.model.parameters():
                if weight.grad is not None:
                    weight -= LEARNING_RATE * weight.grad
        self.model.zero_grad()
        return float(loss.detach())

    def save(self, actor: Path) -> None:
        """The files of verl's FSDP workers; the optimizer's are left out, since the merge reads
        none.
        """
        import torch

        torch.save(self.model.state_dict(), actor / "model_world_size_1_rank_0.pt")
        (actor / "optim_world_size_1_rank_0.pt").touch()
        (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 1}))
        no_weights = shutil.ignore_patterns("*.safetensors")
        shutil.copytree(self.folder, actor / "huggingface", ignore=no_weights, dirs_exist_ok=True)


def merge(words: list[str]) -> None:
    """verl's merger: copies what stands for Megatron's weights to the target."""
    options = dict(zip(words[1::2], words[2::2], strict=True))
    assert (words[0], options["--backend"]) == ("merge", "megatron")
    [weights] = Path(options["--local_dir"]).rglob("dist_ckpt")
    say(f"merging {weights}")
    shutil.copytree(weights, options["--target_dir"])


def install_mindspeed(folder: Path) -> None:
    """A committed checkout that stands for MindSpeed-RL: prepares rows, trains, writes Megatron's
    folders.
    """
    (folder / "cli").mkdir(parents=True)
    (folder / "cli" / "preprocess_data.py").write_text(_PREPARE)
    (folder / "cli" / "train_dapo.py").write_text(
        f"import sys\nsys.path.append({str(ROOT)!r})\nfrom tests.stand_in_trainer import "
        "mindspeed\n"
        "mindspeed(sys.argv[1:])\n"
    )
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], cwd=folder, check=True)


_PREPARE = """
import pathlib, sys, yaml
[folder] = [word.partition("=")[2] for word in sys.argv if word.startswith("--config-path=")]
rows = yaml.safe_load((pathlib.Path(folder) / f"{sys.argv[1]}.yaml").read_text())
assert pathlib.Path(rows["input"]).is_file()
print("preparing rows")
pathlib.Path(rows["output_prefix"] + "_input_ids.idx").touch()
"""


def mindspeed(words: list[str]) -> None:
    """Train as the rendered YAML says: light, on steps that are lines and folders."""
    import yaml

    options = dict(word.lstrip("-").split("=", 1) for word in words)
    config = yaml.safe_load(
        (Path(options["config-path"]) / f"{options['config-name']}.yaml").read_text()
    )
    actor, megatron = config["actor_config"], config["megatron_training"]
    assert list(Path(megatron["data_path"]).parent.glob("data_*.idx"))
    assert Path("cli/train_dapo.py").exists()  # started in its checkout
    folder, total = Path(actor["save"]), megatron["train_iters"]
    start = 0
    if not actor["finetune"]:
        assert actor["load"] == str(folder)
        start = int((folder / "latest_checkpointed_iteration.txt").read_text())
    else:
        assert actor["load"] == "/weights/mcore"
    say(f"starting at {start}")
    for step in range(start + 1, total + 1):
        obey(os.environ.get("STAND_IN", "").split(), step, start)
        if step % megatron["save_interval"] == 0 or step == total:
            part = folder / f"iter_{step:07d}" / "mp_rank_00"
            part.mkdir(parents=True, exist_ok=True)
            (part / "model_optim_rng.pt").touch()
            (folder / "latest_checkpointed_iteration.txt").write_text(str(step))
        numbers = {
            "timing/all": 2.0,
            "grad_norm": 0.5,
            "dapo/score/mean": step / 10,
            "response_length/mean": 9.0,
        }
        items = " | ".join(f"{name} : {value}" for name, value in numbers.items())
        say(f"[2026-01-01 00:00:00] iteration: {step} / {total} | {items} |")
