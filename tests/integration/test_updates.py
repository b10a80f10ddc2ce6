"""Passes, AdamW, schedules and reference models in real updates, against plain loops."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dapo_core.algorithm.balance import split_batch
from dapo_core.algorithm.batch import Batch, random_order
from dapo_core.algorithm.loss import LossTotals, policy_loss
from dapo_core.checkpoint.metadata import read_metadata
from dapo_core.cluster.policy_group import PolicyGroup
from dapo_core.config.algorithm import KLConfig
from dapo_core.machine.timers import PhaseTimer
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.policy.rank import Policy
from dapo_core.training import train
from durable import read_json_lines
from flows.config import Config
from tests.batches import loss_tokens_of, one_by_one, random_batch
from tests.configs import make_config
from tests.in_process import Threads, _Actor, without_ray
from tests.ranks import run_ranks
from tests.sent_weights import sent_weights
from tests.tiny_models import build_tiny
from tests.trainings import World, config_of

STEP = 3
TRAIN = {
    "train_prompts": 4,
    "mini_prompts": 2,
    "passes": 2,
    "learning_rate": 1e-2,
    "warmup_steps": 1,
    "schedule": "cosine",
    "schedule_steps": 5,
    "min_learning_rate_ratio": 0.2,
    "weight_decay": 0.3,
    "adam_beta1": 0.7,
    "adam_beta2": 0.9,
    "adam_epsilon": 1e-3,  # large, so that updates are not signs of gradients
}
# cosines of 0, 45, 90 and 135 degrees: 0.2 + 0.8 (1 + cos) / 2
RATES = [1e-2, 1e-2 * 0.8828427, 1e-2 * 0.6, 1e-2 * 0.3171573]


def _learned(rank: int, config: Config, batch: Batch) -> dict[str, Any]:
    with without_ray():
        actor = _Actor(lambda: Policy(config.model.path or "", config))
        group = PolicyGroup([actor], config, Threads(), hidden_size=64)
        anchored, stats = group.anchor(batch, PhaseTimer())
        updates, _ = group.learn(anchored, stats, STEP)
        return {
            "old": anchored.old_log_probs,
            "updates": updates,
            "weights": actor.executor.submit(sent_weights, actor.target).result(),
        }


def _plain(
    config: Config, batch: Batch, old: torch.Tensor
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return losses and weights of a plain loop with hand-computed rates."""
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.7, 0.9), eps=1e-3, weight_decay=0.3)
    losses = []
    second = (
        random_order(4, config.run.seed, STEP, 1).tolist()
        if config.train.shuffle_passes
        else [0, 1, 2, 3]
    )
    for rate, groups in zip(RATES, ([0, 1], [2, 3], second[:2], second[2:]), strict=True):
        rows = [3 * group + sibling for group in groups for sibling in range(3)]
        mini = replace(batch, old_log_probs=old).select(rows)
        tokens = loss_tokens_of(mini, config.algorithm)
        part = policy_loss(one_by_one(model, mini)[0], None, tokens, config.algorithm)
        optimizer.zero_grad()
        part.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
        for parameters in optimizer.param_groups:
            parameters["lr"] = rate
        optimizer.step()
        losses.append(part.sums.pg_loss)
    return losses, {name: weight.detach() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("shuffle", [True, False])
def test_several_passes_equal_a_plain_loop(tmp_path: Path, shuffle: bool) -> None:
    """The anchor of both passes is the policy before the first update."""
    path = build_tiny(tmp_path / "model", "qwen3", seed=3)
    config = make_config(
        path, train={**TRAIN, "shuffle_passes": shuffle}, rollout={"group_size": 3}
    )
    assert config.scores_before_updates
    one_mini_batch = {**TRAIN, "mini_prompts": 4}  # which is updated twice
    assert make_config(path, train=one_mini_batch).scores_before_updates
    batch = random_batch(num_groups=4, group_size=3, seed=1)
    (learned,) = run_ranks(1, _learned, config, batch)
    losses, weights = _plain(config, batch, learned["old"])
    updates = learned["updates"]
    assert [update.learning_rate for update in updates] == pytest.approx(RATES, rel=1e-6)
    assert [update.policy_version for update in updates] == [1, 2, 3, 4]
    assert [update.sums.pg_loss for update in updates] == pytest.approx(losses, rel=1e-3, abs=1e-6)
    assert abs(updates[2].sums.neg_log_ratio) > 0.01  # the anchor is not the pass's own policy
    assert set(learned["weights"]) == set(weights)
    for name, weight in learned["weights"].items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-3, atol=2e-5)


def _refreshed(rank: int, config: Config, batch: Batch, folder: str) -> dict[str, torch.Tensor]:
    """Return log-probs of policy and reference, before and after a refresh, and after loading."""
    policy = Policy(config.model.path or "", config)
    shares, indices = split_batch(batch, config.train.num_data_ranks, 4096)
    share, found = shares[rank], {"indices": torch.from_numpy(indices[rank])}
    found["policy"], found["begun"] = policy.log_probs(share).log_probs, policy.ref_log_probs(share)
    policy.save(f"{folder}/begun", asynchronous=False)
    policy.refresh_reference()
    policy.update(share, LossTotals.of(batch))
    found["refreshed"] = policy.ref_log_probs(share)
    policy.save(f"{folder}/refreshed", asynchronous=True)
    while not policy.is_saved():
        time.sleep(0.01)
    assert policy.checkpoint_bytes() > 0
    policy.load(f"{folder}/begun")
    found["loaded begun"] = policy.ref_log_probs(share)
    other = Policy(config.model.path or "", config)
    other.load(f"{folder}/refreshed")
    found["loaded refreshed"] = other.ref_log_probs(share)
    never = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"kl": KLConfig(place="loss")})}
    )
    Policy(config.model.path or "", never).save(f"{folder}/never", asynchronous=False)
    other.load(f"{folder}/never")  # whose checkpoint has no reference: it stays
    found["kept"] = other.ref_log_probs(share)
    return found


def test_another_reference_model_is_refreshed_and_saved(tmp_path: Path) -> None:
    path, other = (
        build_tiny(tmp_path / name, "qwen3", seed=seed)
        for name, seed in (("policy", 3), ("other", 4))
    )
    kl = {"place": "loss", "reference_path": str(other), "refresh_every": 2}
    config = make_config(
        path, train={**TRAIN, "num_ranks": 2}, rollout={"group_size": 3}, algorithm={"kl": kl}
    )
    batch = random_batch(num_groups=4, group_size=3, seed=1)
    batch = replace(
        batch, old_log_probs=batch.rollout_log_probs, ref_log_probs=batch.rollout_log_probs
    )
    for name in ("begun", "refreshed", "never"):
        (tmp_path / name).mkdir()
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
        plain, _ = one_by_one(model, batch)
    for rank in run_ranks(2, _refreshed, config, batch, str(tmp_path)):
        width = rank["begun"].shape[1]
        torch.testing.assert_close(
            rank["begun"], plain[rank["indices"], :width], rtol=1e-5, atol=1e-5
        )
        assert (rank["begun"] - rank["policy"]).abs().max() > 0.1
        assert torch.equal(rank["refreshed"], rank["policy"])  # of before the update
        assert torch.equal(rank["loaded begun"], rank["begun"])
        assert torch.equal(rank["loaded refreshed"], rank["refreshed"])
        assert torch.equal(rank["kept"], rank["refreshed"])
    step = read_metadata(tmp_path / "refreshed").state_dict_metadata
    assert {name.partition(".")[2] for name in step if name.startswith("reference.")} == {
        name.partition(".")[2] for name in step if name.startswith("model.")
    }


def _loaded(rank: int, config: Config) -> None:
    Policy(config.model.path or "", config)


def test_a_reference_with_other_sizes_is_refused(tmp_path: Path) -> None:
    path = build_tiny(tmp_path / "policy", "qwen3", seed=3)
    other = build_tiny(tmp_path / "other", "qwen3", seed=3, intermediate_size=32)
    config = make_config(path, algorithm={"kl": {"place": "loss", "reference_path": str(other)}})
    with pytest.raises(
        Exception,
        match=r"other does not match the policy's architecture .* algorithm\.kl\.reference_pa",
    ):
        run_ranks(1, _loaded, config)


@pytest.mark.parametrize(
    ("skipped", "resumed_after", "placement"), [(0, 3, "separate"), (2, 2, "colocated")]
)
def test_a_refreshed_reference_survives_a_resume(
    world: World, tmp_path: Path, skipped: int, resumed_after: int, placement: str
) -> None:
    """KL is 0 in the first step trained after a refresh, and what it would have been in others,
    also resumed.

    A step that is skipped refreshes like any other, also where its weights are off the device.
    """
    silence = tmp_path / "silence"
    (tmp_path / "scorer.py").write_text(
        "from pathlib import Path\n\ndef compute_score(solution_str, **_):\n"
        f"    is_silent = Path({str(silence)!r}).exists()\n"
        "    return {'score': 0 if is_silent else len(solution_str) % 3, 'acc': 0}\n"
    )

    def look(step: int, _: dict[str, float]) -> None:
        if step + 1 == skipped:
            silence.touch()
        else:
            silence.unlink(missing_ok=True)

    def run(name: str, total_steps: int) -> list[dict[str, float]]:
        kl = {"place": "loss", "coefficient": 0.5, "refresh_every": 2}
        keys = {
            "num_ranks": 1,
            "total_steps": total_steps,
            "mini_prompts": 4,
            "learning_rate": 1e-2,
        }
        draw = {"gen_prompts": 4, "max_num_gen_batches": 1, "on_exhausted": "train_partial"}
        config = config_of(
            algorithm={"kl": kl},
            custom_reward={"path": str(tmp_path / "scorer.py")},
            sampler={**draw, "dynamic": True, "metric": "score"},
            train={**keys, "warmup_steps": 0, "placement": placement},
        )
        with without_ray():
            train(config, world.data, world.model, tmp_path / name, look)
        return read_json_lines(tmp_path / name / METRICS_FILE)

    whole = run("whole", 4)
    assert [line["step"] for line in whole if "actor/kl_loss" not in line] == [skipped][
        : bool(skipped)
    ]
    trained = [line for line in whole if "actor/kl_loss" in line]
    assert [line["step"] for line in trained if line["actor/kl_loss"] > 1e-4] == [2, 4][
        bool(skipped) :
    ]
    run("parts", resumed_after)
    lines = run("parts", 4)
    for name in ("actor/kl_loss", "actor/pg_loss", "actor/grad_norm"):
        assert [line.get(name) for line in lines] == [line.get(name) for line in whole]
