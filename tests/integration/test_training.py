"""Training end to end: Ray, two FSDP2 ranks over gloo, an engine, checkpoints."""

import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import pytest

from dapo_core.checkpoint.state import read_state
from dapo_core.errors import RolloutError
from dapo_core.metrics.log import METRICS_FILE
from dapo_core.policy.profiling import PROFILES
from dapo_core.training import TrainResult, train
from durable import read_json_lines
from tasks.processes import supervisor
from tests.in_process import without_ray
from tests.metric_names import expand
from tests.processes import start_time_of, wait_until
from tests.trainings import NUM_PROBLEMS, World, config_of

SAMPLING = {"temperature": 0.9}  # the probe after each sync compares at 1
TOTAL_STEPS = 8
OPTIMIZER_STEPS = 2  # per training step: train_prompts / mini_prompts
# Metrics of every training step, except those of KL and the reference model
# (test_training_options.py), of accelerators (perf/mfu/actor and memory), and timing_s/testing,
# because these steps do not validate.
METRIC_NAMES = expand("""
step wall_time policy_version training/{global_step,epoch} train/num_gen_batches
critic/score/{mean,max,min}
critic/rewards/{mean,max,min} critic/advantages/{mean,max,min} critic/returns/{mean,max,min}
actor/{entropy,pg_loss,pg_clipfrac,pg_clipfrac_lower,ppo_kl,grad_norm,skipped_updates,lr}
response_length/{mean,max,min,clip_ratio} prompt_length/{mean,max,min,clip_ratio}
response/aborted_ratio response_length_non_aborted/{mean,max,min}
global_seqlen/{min,max,minmax_diff,balanced_min,balanced_max,mean}
perf/{engine_idle_ratio,engine_idle_slot_ratio}
rollout/{probs_diff_mean,probs_diff_max,kl,k3_kl,ppl_ratio,ess,chi2_token,chi2_seq}
rollout/{compared_tokens,log_probs_diff_mean,probs_diff_high_ratio}
rollout/fresh_{compared_tokens,log_probs_diff_mean,probs_diff_high_ratio}
rollout/fresh_{probs_diff_mean,probs_diff_max,kl,k3_kl}
rollout_corr/{training_ppl,training_log_ppl,rollout_ppl,rollout_log_ppl,log_ppl_diff,log_ppl_abs_diff,ppl_ratio}
rollout_corr/{log_ppl_diff_max,log_ppl_diff_min,kl,k3_kl,chi2_token,chi2_seq}
sampler/{kept,all_right,all_wrong,all_equal,surplus,carried_out}_{groups,tokens}
sampler/{waste_ratio,accuracy} sampler/{finished,kept,surplus}_{response_length,clip_ratio}
sampler/staleness/{mean,max,token_ratio} reward/{right,wrong,no_answer,error,timeout,overlong}_ratio
timing_s/{gen,reward,old_log_prob,adv,update_actor,weight_sync,save_checkpoint,step}
timing_per_token_ms/{gen,old_log_prob,adv,update_actor} perf/{total_num_tokens,generated_tokens}
perf/{trained_response_tokens,time_per_step,throughput} perf/{max_rss_gb,cpu_memory_used_gb}
timing_s/{pack,metrics,turns}
perf/{max_rss_gb,cpu_memory_used_gb}/{generate,anchor,update,publish} weight_sync/probe_difference
""")
OF_STALE_TOKENS = expand("rollout/importance_{mean,truncated_ratio}")
OF_SAVED_ROLLOUTS = {"timing_s/save_rollouts"}  # in the first and the last step
PROFILE = {"steps": [2, 3], "ranks": [1]}
NOT_OF_THE_RESULT = (
    "wall_time",
    "timing_s/",
    "timing_per_token_ms/",
    "perf/time_per_step",
    "perf/throughput",
    "perf/engine_",
    "perf/max",
    "perf/cpu",
)


@dataclass(frozen=True)
class Run:
    """Output and metrics of a training, and what `on_step` saw."""

    folder: Path
    result: TrainResult
    metrics: list[dict[str, float]]
    checkpoints: list[list[str]]  # after each step
    positions: list[int]  # of the next prompt, after each step


def checkpoint_names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def run(world: World, ray_address: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Eight steps with synchronous checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    checkpoints: list[list[str]] = []
    positions: list[int] = []

    def look(step: int, metrics: dict[str, float]) -> None:
        checkpoints.append(checkpoint_names(folder))
        positions.append(read_state(folder / "checkpoints" / f"step_{step:06d}").prompt_position)

    config = config_of(
        train={"total_steps": TOTAL_STEPS, "ray_address": ray_address, "profile": PROFILE},
        rollout=SAMPLING,
        checkpoint={"asynchronous": False},
    )
    result = train(config, world.data, world.model, folder, look)
    return Run(folder, result, read_json_lines(folder / METRICS_FILE), checkpoints, positions)


def test_selected_ranks_trace_selected_steps(run: Run) -> None:
    traces = {
        path.name: json.loads(path.read_bytes()) for path in (run.folder / PROFILES).iterdir()
    }
    assert set(traces) == {"step_000002_rank_1.json", "step_000003_rank_1.json"}
    for trace in traces.values():
        spans = Counter(
            event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"
        )
        assert {
            "old_log_prob",
            "forward",
            "backward",
            "weight_sync",
            "save_checkpoint",
        } <= spans.keys()
        assert spans["update_actor"] == spans["optimizer"] == OPTIMIZER_STEPS


def test_exactly_the_documented_metrics_are_written(run: Run) -> None:
    for line in run.metrics:
        has_stale = line["sampler/staleness/token_ratio"] > 0
        assert has_stale == (line["step"] > 1)
        names = METRIC_NAMES | OF_STALE_TOKENS if has_stale else METRIC_NAMES
        is_saved = line["step"] in (1, TOTAL_STEPS)
        assert set(line) == (names | OF_SAVED_ROLLOUTS if is_saved else names)
        assert None not in line.values()


def test_phase_times_add_up_to_the_step(run: Run) -> None:
    names = METRIC_NAMES | OF_SAVED_ROLLOUTS
    phases = [name for name in names if name.startswith("timing_s/") and name != "timing_s/step"]
    shares = []  # of each step's time outside all phases
    for line in run.metrics:
        spent = sum(line.get(phase, 0.0) for phase in phases)
        assert spent <= line["timing_s/step"]
        shares.append(1 - spent / line["timing_s/step"])
    # The rest is bookkeeping. Other processes may delay one step; a missing phase would show in
    # all.
    assert min(shares) < 0.02, shares


def test_the_metrics_of_a_step_are_consistent(run: Run) -> None:
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4, 5, 6, 7, 8]
    carried_in = 0.0
    for line in run.metrics:
        num_responses = 16  # 4 prompts x 4 responses
        num_tokens = num_responses * (line["prompt_length/mean"] + line["response_length/mean"])
        assert line["perf/total_num_tokens"] == pytest.approx(num_tokens)
        assert line["perf/trained_response_tokens"] == line["sampler/kept_tokens"]
        # 2 ranks, 1 engine
        assert line["perf/throughput"] == pytest.approx(num_tokens / line["timing_s/step"] / 3)
        fates = ("kept", "all_right", "all_wrong", "all_equal", "surplus")
        went = sum(line[f"sampler/{fate}_tokens"] for fate in fates)
        assert line["perf/generated_tokens"] + carried_in == went
        carried_in = line["sampler/surplus_tokens"]
        assert (
            sum(line[f"reward/{verdict}_ratio"] for verdict in ("right", "wrong", "no_answer"))
            == 1.0
        )
        # the anchor is the policy that sampled, except for surplus, which is one step old
        assert line["rollout/fresh_probs_diff_max"] < 1e-4
        assert line["rollout/fresh_log_probs_diff_mean"] < 1e-5  # nats; float32 on a CPU
        assert line["actor/grad_norm"] > 0
        assert line["actor/skipped_updates"] == 0


def test_engine_and_policy_agree_after_every_step(run: Run) -> None:
    assert [line["policy_version"] for line in run.metrics] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert max(line["weight_sync/probe_difference"] for line in run.metrics) < 1e-4


def test_the_latest_checkpoints_are_kept(run: Run) -> None:
    assert run.checkpoints[:3] == [
        ["latest", "lock", "step_000001"],
        ["latest", "lock", "step_000001", "step_000002"],
        ["latest", "lock", "step_000002", "step_000003"],
    ]
    # a finished output keeps one, whatever checkpoint.keep_last is
    assert checkpoint_names(run.folder) == ["latest", "step_000008"]


def test_learning_rate_and_position_follow_the_steps(run: Run) -> None:
    assert (run.result.steps, run.result.policy_version) == (
        TOTAL_STEPS,
        TOTAL_STEPS * OPTIMIZER_STEPS,
    )
    assert run.result.checkpoint.name == "step_000008"
    # 1/6 of the rate per optimizer step of warm-up: steps 2, 4, 6 end training steps 1 to 3
    assert [line["actor/lr"] for line in run.metrics] == pytest.approx(
        [2e-3 / 6, 4e-3 / 6, *[1e-3] * 6]
    )
    drawn = [round(6 * line["train/num_gen_batches"]) for line in run.metrics]
    assert run.positions == [*accumulate(drawn)]
    epochs = [line["training/epoch"] for line in run.metrics]
    assert epochs == pytest.approx([position / NUM_PROBLEMS for position in run.positions])


def test_placement_does_not_change_results(
    run: Run, world: World, ray_address: str, tmp_path: Path
) -> None:
    """Sequence parallelism, replicas and two colocated engines instead of two sharded ranks."""
    train(
        config_of(
            rollout={"num_workers": 2, **SAMPLING},
            train={
                "total_steps": 2,
                "ray_address": ray_address,
                "sequence_parallel": 2,
                "fsdp_size": 1,
                "placement": "colocated",
                "gradient_checkpointing": False,
                "reshard_after_forward": False,
                "logits_chunk_tokens": 7,
            },
        ),
        world.data,
        world.model,
        tmp_path,
    )
    for line, other in zip(read_json_lines(tmp_path / METRICS_FILE), run.metrics[:2], strict=True):
        # one data-parallel rank has it all
        assert line["global_seqlen/balanced_max"] == line["perf/total_num_tokens"]
        assert other["global_seqlen/balanced_max"] < other["perf/total_num_tokens"]
        for name in METRIC_NAMES:
            if not name.startswith((*NOT_OF_THE_RESULT, "global_seqlen/")):
                # differences of nearly equal numbers, such as a KL, keep the noise of their terms
                assert line[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), (
                    line["step"],
                    name,
                )


def started_since(before: dict[int, str]) -> Callable[[], bool]:
    """Return a check that all descendant processes started since `before` have ended."""
    started = {
        pid: at for pid, at in supervisor.descendants(os.getpid()).items() if pid not in before
    }
    return lambda: all(start_time_of(pid) != at for pid, at in started.items())


def test_a_stalled_step_ends_in_time_with_every_process(world: World, tmp_path: Path) -> None:
    """The scorer never answers, and its own time limit is longer."""
    before = supervisor.descendants(os.getpid())
    scorer = tmp_path / "scorer.py"
    scorer.write_text(
        "import time\n\n\ndef compute_score(*arguments, **named):\n    time.sleep(600)\n"
    )
    config = config_of(
        custom_reward={"path": str(scorer)},
        reward={"timeout_seconds": 500.0},
        sampler={"max_seconds_without_kept": 5.0},
        train={"total_steps": 1, "num_ranks": 1},
    )
    with pytest.raises(RolloutError) as caught, without_ray():
        train(config, world.data, world.model, tmp_path / "output")
    message = str(caught.value)
    assert "no group was kept for" in message
    assert "6 groups with" in message
    # they are generated and wait for scores
    assert "6 groups with 0 response tokens" not in message
    assert "No group finished" in message
    wait_until(started_since(before), "every process is gone")
