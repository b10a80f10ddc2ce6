"""Real ranks save and load exactly, on other rank counts, and with failing writes."""

import errno
import random
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from dapo_core.algorithm.balance import RankShare, split_batch
from dapo_core.algorithm.loss import LossTotals
from dapo_core.algorithm.update import Update
from dapo_core.checkpoint.shards import Shards, _Writer
from dapo_core.cluster.actors import Actors
from dapo_core.cluster.connection import connected_to_ray
from dapo_core.cluster.policy_group import PolicyGroup
from dapo_core.cluster.roles import PolicyRank
from dapo_core.errors import CheckpointError
from dapo_core.machine.device import Cpu
from dapo_core.memory.holdings import OF_RANKS
from dapo_core.policy.rank import Policy
from flows.config import Config
from tests.batches import random_batch
from tests.configs import make_config
from tests.ranks import run_ranks
from tests.tiny_models import build_tiny

META, CPU = torch.device("meta"), torch.device("cpu")
TwoRanks = tuple[Path, Any, Any, Any]  # folder; results of _save, _fail and _placed by rank
MOMENTS = ("exp_avg", "exp_avg_sq")
BATCH = random_batch(num_groups=4, group_size=2)
BATCH = replace(BATCH, old_log_probs=torch.full_like(BATCH.rollout_log_probs, -3.0))
TOTALS = LossTotals.of(BATCH)
LEARN = {"learning_rate": 1e-2, "warmup_steps": 4}
SMALL_FILE = 8192  # bytes; less than a rank's shards


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose 5 experts and vocabulary do not divide evenly over 3 and 4 ranks."""
    return build_tiny(tmp_path_factory.mktemp("model"), "qwen3_moe", seed=11)


def _config(model_path: Path, num_ranks: int, **train: Any) -> Config:
    train = {**LEARN, "num_ranks": num_ranks, "train_prompts": 6, "mini_prompts": 6, **train}
    return make_config(model_path, run={"seed": 5}, rollout={"group_size": 4}, train=train)


def _policy(config: Config) -> Policy:
    return Policy(config.model.path or "", config)


def _share(rank: int, num_ranks: int) -> RankShare:
    return split_batch(BATCH, num_ranks, 4096)[0][rank]


def _update(policy: Policy, rank: int) -> Update:
    return policy.update(_share(rank, policy.train.num_ranks), TOTALS)


def _whole(policy: Policy) -> dict[str, torch.Tensor]:
    """Return copies of the full parameters and their AdamW state."""
    tensors = {}
    for name, parameter in policy.model.named_parameters():
        tensors[name] = parameter.full_tensor().detach().clone()
        for kind, value in policy.optimizer.state[parameter].items():
            tensors[f"{name} {kind}"] = (
                value.full_tensor() if hasattr(value, "full_tensor") else value
            ).clone()
    return tensors


def _draws() -> list[float]:
    """Draw from each generator; three normal draws leave a cached value where pairs are drawn."""
    normal = [random.gauss(0, 1) for _ in range(3)] + np.random.standard_normal(3).tolist()
    return [*normal, random.random(), np.random.random(), *torch.rand(2).tolist()]


def _wait(policy: Policy) -> None:
    """Wait for the asynchronous save without checking its result."""
    assert policy.shards._running is not None
    wait([policy.shards._running[1]])


@contextmanager
def _held_writes() -> Iterator[threading.Event]:
    """Block writes until the event is set."""
    may_write, write_data = threading.Event(), _Writer.write_data

    def held(*arguments: Any) -> Any:
        assert may_write.wait(300)
        return write_data(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Writer, "write_data", held)
        yield may_write


@dataclass(frozen=True)
class Saved:
    """A rank's state when it saved, and after the next update."""

    tensors: dict[str, torch.Tensor]
    draws: list[float]
    next_sums: Update
    next_tensors: dict[str, torch.Tensor]
    facts: dict[str, bool]
    num_bytes: int


def _save(rank: int, config: Config, folder: Path) -> Saved:
    """Update twice, then save while a third update runs; also returns facts that must hold."""
    policy, unsaved = _policy(config), _policy(config)
    facts, bytes_at_first = {}, policy.checkpoint_bytes()
    policy.save(str(folder / "first"), asynchronous=False)
    for _ in range(2):
        _update(policy, rank)
        _update(unsaved, rank)
    tensors, expected = _whole(policy), _whole(unsaved)
    facts["saving before the first update has no effect on training"] = all(
        torch.equal(tensor, expected[name]) for name, tensor in tensors.items()
    )
    facts["bytes are known before the first update"] = policy.checkpoint_bytes() == bytes_at_first
    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)
    _draws()
    with _held_writes() as may_write:
        policy.save(str(folder / "saved"), asynchronous=True)
        draws, sums, next_tensors = _draws(), _update(policy, rank), _whole(policy)
        policy.offload(OF_RANKS)
        policy.onload(OF_RANKS)
        facts["the write is still running"] = not policy.is_saved()
        with pytest.raises(CheckpointError, match="saved is still being written"):
            policy.save(str(folder / "other"), asynchronous=True)
        with pytest.raises(CheckpointError, match="saved is still being written"):
            policy.load(str(folder / "first"))
        may_write.set()
        _wait(policy)
    facts["the write is done"] = policy.is_saved() and policy.is_saved()
    return Saved(tensors, draws, sums, next_tensors, facts, policy.checkpoint_bytes())


def _on_two_ranks(rank: int, config: Config, folder: Path) -> tuple[Saved, Any, list[str]]:
    """Run everything that needs two ranks in one process group."""
    return (
        _save(rank, config, folder),
        _fail(rank, config, folder / "failing"),
        _placed(rank, config, folder),
    )


@pytest.fixture(scope="module")
def two_ranks(model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    folder = tmp_path_factory.mktemp("checkpoints")
    (folder / "failing").mkdir()
    return folder, *zip(*run_ranks(2, _on_two_ranks, _config(model_path, 2), folder), strict=True)


@pytest.fixture(scope="module")
def saved(two_ranks: TwoRanks) -> tuple[Path, list[Saved]]:
    return two_ranks[0], two_ranks[1]


def test_saving_and_training_at_the_same_time_do_not_affect_each_other(
    saved: tuple[Path, list[Saved]],
) -> None:
    for rank in saved[1]:
        assert [fact for fact, holds in rank.facts.items() if not holds] == []


def _require_size(folder: Path, num_bytes: int, num_ranks: int) -> None:
    """The files have the predicted size, plus a header per tensor and the generator states."""
    metadata = torch.distributed.checkpoint.FileSystemReader(folder).read_metadata()
    num_tensors = len(metadata.state_dict_metadata) * num_ranks
    num_file_bytes = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    assert 0 < num_file_bytes - num_bytes < 2048 * num_tensors + 16384 * num_ranks


def test_the_checkpoint_has_the_predicted_size(saved: tuple[Path, list[Saved]]) -> None:
    folder, ranks = saved
    num_elements = sum(
        tensor.numel()
        for name, tensor in ranks[0].tensors.items()
        if "exp_avg" not in name and "step" not in name
    )
    num_counts = sum("step" in name for name in ranks[0].tensors)
    expected = 4 * (3 * num_elements + num_counts)  # tied weights once
    assert sum(rank.num_bytes for rank in ranks) == expected
    for name in ("first", "saved"):
        _require_size(folder / name, expected, 2)


@dataclass(frozen=True)
class Loaded:
    """A rank's state after loading, and after the next update."""

    num_optimizer_steps: int
    tensors: dict[str, torch.Tensor]
    draws: list[float]
    next_sums: Update
    next_tensors: dict[str, torch.Tensor]
    num_bytes: int


def _load(rank: int, config: Config, folder: Path, again: Path) -> Loaded:
    """Load, save elsewhere, load that into a second policy, and update it."""
    policy = _policy(config)
    policy.load(str(folder / "saved"))
    policy.save(str(again), asynchronous=False)
    first, policy = policy, _policy(config)
    policy.load(str(again))
    expected, tensors = _whole(first), _whole(policy)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    num_optimizer_steps, draws, sums = policy.num_optimizer_steps, _draws(), _update(policy, rank)
    return Loaded(
        num_optimizer_steps, tensors, draws, sums, _whole(policy), policy.checkpoint_bytes()
    )


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(2, {}), (3, {"weight_decay": 0.3}), (4, {"fsdp_size": 2})],
    ids=["2", "3 and another weight decay", "2 copies on 2"],
)
def test_any_number_of_ranks_continues_from_a_checkpoint(
    model_path: Path,
    saved: tuple[Path, list[Saved]],
    tmp_path: Path,
    num_ranks: int,
    options: dict[str, Any],
) -> None:
    folder, before = saved
    ranks = run_ranks(num_ranks, _load, _config(model_path, num_ranks, **options), folder, tmp_path)
    for rank in ranks:
        assert rank.num_optimizer_steps == 2
        assert rank.tensors.keys() == before[0].tensors.keys()
        for name, tensor in rank.tensors.items():
            assert torch.equal(tensor, before[0].tensors[name]), name
        # the third of four warm-up steps
        assert rank.next_sums.learning_rate == pytest.approx(0.01 * 3 / 4)
    _require_same_update(
        ranks[0], before[0], options.get("weight_decay", 0.1) - 0.1, num_ranks == 2
    )
    _require_size(tmp_path, sum(rank.num_bytes for rank in ranks), num_ranks)
    assert [rank.draws for rank in ranks[:2]] == [rank.draws for rank in before[:num_ranks]]
    for generator in zip(*(rank.draws for rank in ranks), strict=True):
        assert len(set(generator)) == num_ranks


def _require_same_update(loaded: Loaded, saved: Saved, more_decay: float, is_exact: bool) -> None:
    """Compare updates; AdamW also subtracts learning rate * weight decay of each weight."""
    for name, tensor in loaded.next_tensors.items():
        expected = saved.next_tensors[name]
        if is_exact:
            assert torch.equal(tensor, expected), name
        elif "exp_avg" in name or "step" in name:
            torch.testing.assert_close(
                tensor, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max())
            )
        else:
            expected = expected - 0.0075 * more_decay * saved.tensors[name]
            # if all gradients so far are noise, so is the ratio of their moments
            assert torch.isclose(tensor, expected, rtol=0, atol=1e-5).float().mean() > 0.995, name


def _continued(
    rank: int, trains: list[dict[str, Any]], model_path: Path, folder: Path
) -> list[tuple[dict[str, torch.Tensor], Update, dict[str, torch.Tensor], int]]:
    """Return the state in a checkpoint, the next update, the state after it, and the bytes saved.

    The first of the layouts updates twice and saves; the others load its checkpoint.
    """
    found = []
    for train in trains:
        policy = _policy(_config(model_path, torch.distributed.get_world_size(), **train))
        if (folder / ".metadata").exists():
            policy.load(str(folder))
        else:
            for _ in range(2):
                _update(policy, rank)
            policy.save(str(folder), asynchronous=False)
        state = _whole(policy)
        num_bytes = policy.checkpoint_bytes()
        found.append((state, _update(policy, rank), _whole(policy), num_bytes))
        torch.distributed.barrier()
    return found


@pytest.mark.parametrize("is_divided", [True, False])
def test_a_training_continues_with_its_experts_divided_otherwise(
    tmp_path: Path, is_divided: bool
) -> None:
    """On four ranks, FSDP2 splits three experts unevenly over two of them."""
    path = build_tiny(tmp_path / "model", "qwen3_moe", seed=11, num_experts=6)
    folder = tmp_path / "saved"
    divided, whole = {"expert_parallel": 2}, {"expert_parallel": 1}
    first, other = (divided, whole) if is_divided else (whole, divided)
    ranks = run_ranks(4, _continued, [first, first, other], path, folder)
    _require_size(folder, sum(rank[0][3] for rank in ranks), 4)
    saved, same, changed = ranks[0]
    elsewhere = run_ranks(3, _continued, [whole, {"expert_parallel": 3}], path, folder)[0]
    for state, update, after, _ in (same, changed, *elsewhere):
        assert all(torch.equal(state[name], tensor) for name, tensor in saved[0].items())
        assert update.grad_norm == pytest.approx(saved[1].grad_norm, rel=1e-4)
        for name, tensor in after.items():
            if "exp_avg" in name:
                error = (tensor - saved[2][name]).norm()
                assert error <= 1e-5 * saved[2][name].norm(), name
    assert same[1] == saved[1]
    assert all(torch.equal(same[2][name], tensor) for name, tensor in saved[2].items())


def _save_to_the_end(policy: Policy, folder: Path, asynchronous: bool) -> None:
    policy.save(str(folder), asynchronous)
    if asynchronous:
        _wait(policy)
        policy.is_saved()


def _fail(rank: int, config: Config, folder: Path) -> list[tuple[str, int | None]]:
    """Return each rank's errors when rank 1 may only write small files; all ranks keep working."""
    policy = _policy(config)
    update, policy.optimizer.step = policy.optimizer.step, lambda: None  # type: ignore[method-assign]
    _update(policy, rank)  # leaves gradients but creates no moments, like a skipped update
    policy.optimizer.step = update  # type: ignore[method-assign]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    errors: list[tuple[str, int | None]] = []

    def record(error: Exception) -> None:
        errors.append((str(error), getattr(error, "errno", None)))

    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILE, limits[1]))
    for name, asynchronous in (("sync", False), ("async", True)):
        with pytest.raises(OSError, match="rank 1") as raised:
            _save_to_the_end(policy, folder / name, asynchronous)
        record(raised.value)
        assert policy.is_saved()  # the error is raised only once
        policy.log_probs(_share(rank, 2))
    policy.save(str(folder / "async"), asynchronous=True)
    policy.end_save()
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for missing in ("sync", "nowhere"):
        with pytest.raises(CheckpointError) as unreadable:
            policy.load(str(folder / missing))
        record(unreadable.value)
    policy.save(str(folder / "whole"), asynchronous=True)
    policy.end_save()
    _update(policy, rank)
    other = _policy(config)
    other.load(str(folder / "whole"))
    _update(other, rank)
    expected = _whole(policy)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in _whole(other).items())
    return errors


def test_a_failed_write_raises_on_every_rank_and_training_continues(two_ranks: TwoRanks) -> None:
    folder = two_ranks[0] / "failing"
    for errors in two_ranks[2]:
        for name, (message, number) in zip(("sync", "async"), errors[:2], strict=True):
            assert number == errno.EFBIG
            assert (
                message
                == f"[Errno 27] rank 1 cannot write its shards: File too large: '{folder / name}'"
            )
        for name, (message, _) in zip(("sync", "nowhere"), errors[2:], strict=True):
            assert message.startswith(f"the shards in {folder / name} cannot be loaded: rank 0: ")
            assert "No such file" in message


class _Meta(Cpu):
    """The meta device in place of an accelerator with its own memory."""

    def torch_device(self) -> torch.device:
        return META


def _placed(rank: int, config: Config, folder: Path) -> list[str]:
    """Return violated facts about where weights and moments are."""
    policy, facts = _policy(config), {}
    meta = _Meta()
    for is_offloaded, place in ((False, META), (True, CPU)):
        optimizer = torch.optim.AdamW(policy.model.parameters())
        Shards(policy._causal_lm(), optimizer, meta, is_offloaded, run_seed=0)._state(0)
        moments = {
            state[name].to_local().device for state in optimizer.state.values() for name in MOMENTS
        }
        facts[f"new moments with offloading {is_offloaded} are on {place}"] = moments == {place}
    _update(policy, rank)
    before = _places(policy)
    policy.save(str(folder / "kept"), asynchronous=False)
    policy.load(str(folder / "kept"))
    facts["saving and loading do not move tensors"] = _places(policy) == before
    return [fact for fact, holds in facts.items() if not holds]


def _places(policy: Policy) -> list[int]:
    states = policy.optimizer.state.items()
    tensors = [
        tensor
        for parameter, state in states
        for tensor in (parameter, *(state[name] for name in MOMENTS))
    ]
    return [tensor.to_local().data_ptr() for tensor in tensors]


def test_weights_and_moments_stay_on_their_device(two_ranks: TwoRanks) -> None:
    assert list(two_ranks[3]) == [[], []]


@pytest.fixture
def group(model_path: Path, ray_address: str) -> Iterator[PolicyGroup]:
    """Two ranks as Ray actors."""
    config = _config(model_path, 2, ray_address=ray_address)
    with connected_to_ray(config.train, num_cpus=0):
        ranks = [ray.remote(PolicyRank).options(num_cpus=1).remote() for _ in range(2)]
        address = ray.get(ranks[0].rendezvous.remote())
        ray.get(
            [
                rank.start.remote(n, 2, address, str(model_path), config)
                for n, rank in enumerate(ranks)
            ]
        )
        actors = Actors()
        actors.add("policy rank", ranks)
        yield PolicyGroup(ranks, config, actors, hidden_size=64)
        for rank in ranks:
            ray.kill(rank)


def _wait_until_saved(group: PolicyGroup) -> None:
    while not group.is_saved():
        pass


def test_the_policy_group_saves_and_reports_errors(group: PolicyGroup, tmp_path: Path) -> None:
    assert group.is_saved()
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotADirectoryError) as raised:
        group.save(str(file / "step"), asynchronous=False)
    assert raised.value.errno == errno.ENOTDIR
    group.save(str(file / "step"), asynchronous=True)
    with pytest.raises(CheckpointError, match="is still being written"):
        group.save(str(tmp_path / "step"), asynchronous=True)
    with pytest.raises(NotADirectoryError, match="rank 0 cannot write its shards: Not a directory"):
        _wait_until_saved(group)
    assert group.is_saved()
    group.save(str(tmp_path / "step"), asynchronous=True)
    _wait_until_saved(group)
    _require_size(tmp_path / "step", group.checkpoint_bytes(), 2)
    group.load(str(tmp_path / "step"))
