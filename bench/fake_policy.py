"""Counts the bytes a policy rank holds in each phase, with fake tensors and the true number of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module
from math import isqrt, prod
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from made_up import rows, write_model_folder
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed import ProcessGroup
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import PretrainedConfig

from dapo_core.algorithm.balance import RankShare
from dapo_core.algorithm.batch import Batch
from dapo_core.algorithm.loss import LossTotals
from dapo_core.config.training import TrainingConfig
from dapo_core.model.folder import IMAGE_TOKEN, read_config
from dapo_core.model.inputs import ImageReference
from dapo_core.policy import experts, log_probs, routing, vision
from dapo_core.policy import model as sharding
from dapo_core.policy import rank as policy_rank
from dapo_core.policy.all_to_all import all_to_all
from dapo_core.policy.attention import sequence_group
from dapo_core.policy.packing import PackedRow
from dapo_core.policy.routing import Routing

TOTAL = "Total"
CONSTANT_ELEMENTS = 4096  # of fake tensors that keep their values: those made of pictures' grids
ROW_TENSORS = ("token_ids", "position_ids", "predictors", "targets", "tokens", "sequences")
DEEP_FEATURES = "_deepstack_process"  # of a decoder that adds features to hidden states

Parts = dict[str, int]  # bytes by the tracker's categories, and their sum under TOTAL


def count(
    model_config: PretrainedConfig, config: TrainingConfig, folder: Path, num_siblings: int = 1
) -> dict[str, Parts]:
    """Returns what a rank holds at the peak of each phase, for two micro-batches of one longest
    sequence each, or of `num_siblings` that share their prompt.

    Runs the policy's own code: sharding, packing, TokenLogProbs, update. Only weight loading, the
    checkpoint writer and the collectives are replaced. The second micro-batch finds the first one's
    gradients, the update Adam's moments from an earlier one. The prompts of a model that reads
    pictures are a picture each. The device is a CPU under train.dtype whose tensors have no memory,
    so attention uses the CPU kernel. `folder` receives a model folder without weights.
    """
    write_model_folder(model_config, folder)
    with _fake_policy(folder, config) as policy:
        longest = config.data.max_prompt_tokens, config.rollout.max_response_tokens
        shown = getattr(model_config, "vision_config", None)
        merge = 0 if shown is None else shown.spatial_merge_size
        warm = _share(2, 4 * config.train.sequence_parallel, 1, merge)
        share = _share(*longest, 2 * num_siblings, merge, num_siblings)
        # DTensor caches its sharding plans on first use, with tensors that the tracker would count.
        policy.log_probs(warm)
        policy.update(warm, LossTotals(1, 1), True)  # leaves gradients
        scoring = (
            _peaks(policy, lambda: policy.log_probs(share))[-1]
            if config.scores_before_updates
            else None
        )
        measures = scoring is None
        update, optimizer = _peaks(policy, lambda: policy.update(share, LossTotals(1, 1), measures))
    return {
        **({"old_log_probs": scoring} if scoring else {}),
        "update": update,
        "optimizer": optimizer,
    }


class _RealShare(RankShare):
    """A share whose rows stay real tensors, since packing needs the lengths of rows."""

    def micro_batch(self, number: int) -> Batch:
        with unset_fake_temporarily():
            return super().micro_batch(number)


def _share(
    num_prompt_tokens: int,
    num_response_tokens: int,
    num_rows: int,
    merge: int,
    num_siblings: int = 1,
) -> RankShare:
    """Return a share of equal rows, each micro-batch of siblings; each prompt is a picture if a
    token's side has patches.
    """
    with unset_fake_temporarily():
        share = rows(num_prompt_tokens, num_response_tokens, num_rows)
    if merge:
        sides = range(isqrt(num_prompt_tokens), 0, -1)
        height = next(side for side in sides if num_prompt_tokens % side == 0)
        grid = (1, merge * height, merge * num_prompt_tokens // height)
        names = (f"{number}.png" for number in range(num_rows))
        images = [(ImageReference(name, grid, 0, num_prompt_tokens),) for name in names]
        share = replace(share, batch=replace(share.batch, images=images))
    groups = np.arange(num_rows).reshape(-1, num_siblings)
    with unset_fake_temporarily():
        first = torch.from_numpy(groups[:, 0].repeat(num_siblings))
        batch = replace(share.batch, group_ids=first, token_ids=share.batch.token_ids[first])
    return _RealShare(batch, list(groups))


class _Numbers(TorchDispatchMode):
    """Returns 1.0 when code reads a value of a fake tensor that is not known."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_read = func is torch.ops.aten._local_scalar_dense.default
        if is_read and isinstance(args[0], FakeTensor) and args[0].constant is None:
            return 1.0
        return func(*args, **(kwargs or {}))


@contextmanager
def _fake_policy(folder: Path, config: TrainingConfig) -> Iterator[policy_rank.Policy]:
    """Build a rank's policy on fake tensors, among train.num_ranks ranks whose collectives return
    at once.
    """
    train = config.train
    # Take a rank whose slice of a row is all response tokens; rank 0's begins with the prompt.
    dist.init_process_group(
        "fake", rank=train.sequence_parallel - 1, world_size=train.num_ranks, store=FakeStore()
    )
    try:
        group = sequence_group(train.sequence_parallel)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with ExitStack() as stack:
            for module, name, replacement in (
                (sharding, "init_device_mesh", _on_real_tensors(sharding.init_device_mesh)),
                (DeviceMesh, "__init__", _on_real_tensors(DeviceMesh.__init__)),
                (sharding, "_fill", lambda *_: None),
                (experts, "_exchange_counts", lambda sent, _: (torch.ones_like(sent), [], [])),
                (experts, "all_to_all", _equal_loads),
                (Routing, "count", lambda *_: None),  # depends on values
                (routing, "returns_probabilities", lambda _: False),  # too, and stays cached
                (policy_rank, "sequence_group", lambda *_: group),
                (policy_rank, "Shards", lambda *_: None),  # starts a gloo group
                (policy_rank, "pack", _with_fake_rows(policy_rank.pack, mode)),
                (log_probs, "probe_row", _with_fake_rows(log_probs.probe_row, mode)),
                (vision, "ImageProcessor", _Pixels),
                (fake_tensor, "CONSTANT_NUMEL_LIMIT", CONSTANT_ELEMENTS),
                *_for_pictures(folder),
            ):
                stack.enter_context(patch.object(module, name, replacement))
            stack.enter_context(mode)
            stack.enter_context(_Numbers())
            yield policy_rank.Policy(folder, config)
    finally:
        dist.destroy_process_group()


def _on_real_tensors(make: Callable[..., Any]) -> Callable[..., Any]:
    def make_real(*arguments: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return make(*arguments, **options)

    return make_real


def _equal_loads(
    rows: torch.Tensor, _sends: object, _receives: object, group: ProcessGroup
) -> torch.Tensor:
    """Replace `all_to_all`: every rank's experts get the same number of rows."""
    parts = list(map(len, rows.tensor_split(group.size())))
    return all_to_all(rows, parts, parts, group)


class _Pixels:
    """Replaces ImageProcessor: reads no file, and returns pixels of the size of a picture's grid.

    The values of grids stay known, since the tower splits its tensors by them.
    """

    def __init__(self, model_path: str | Path) -> None:
        vision = read_config(Path(model_path))["vision_config"]
        names = "in_channels", "temporal_patch_size", "patch_size", "patch_size"
        self._patch_values = prod(vision[name] for name in names)

    def pixels(self, images: Sequence[ImageReference]) -> tuple[torch.Tensor, torch.Tensor]:
        grids = [image.grid_thw for image in images]
        return torch.zeros(sum(map(prod, grids)), self._patch_values), torch.tensor(grids)


def _for_pictures(folder: Path) -> list[tuple[Any, str, Any]]:
    """Return replacements for what depends on values in a model that reads pictures.

    The functions that compute places of patches run on real tensors. Small results keep their
    values, by which attention splits its tensors.
    """
    config = read_config(folder)
    if IMAGE_TOKEN not in config:
        return []
    kind = config["model_type"]
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")

    def on_real_grids(compute: Callable[..., Any]) -> Callable[..., Any]:
        def compute_fake(grids: FakeTensor, *arguments: Any, **options: Any) -> Any:
            with unset_fake_temporarily():
                places = compute(grids.constant, *arguments, **options)
            return tree_map_only(torch.Tensor, torch.ops.aten.lift_fresh, places)

        return compute_fake

    names = [name for name in vars(module) if name.startswith("get_vision_")]
    places = [(module, name, on_real_grids(getattr(module, name))) for name in names]
    deep = [each for each in vars(module).values() if hasattr(each, DEEP_FEATURES)]
    return [*places, *((decoder, DEEP_FEATURES, _add_features) for decoder in deep)]


def _add_features(
    _decoder: Any, hidden: torch.Tensor, _mask: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """Replace `_deepstack_process`, which finds pictures' tokens by a mask: take the first ones."""
    hidden, num_tokens = hidden.clone(), len(features)
    hidden[:, :num_tokens] = hidden[:, :num_tokens] + features
    return hidden


def _with_fake_rows(
    make: Callable[..., PackedRow], mode: FakeTensorMode
) -> Callable[..., PackedRow]:
    """Wrap `make` to run on real tensors and return its row as fake ones."""

    def make_fake(*arguments: Any) -> PackedRow:
        with unset_fake_temporarily():
            row = make(*arguments)
        packing = row.packing
        packing.positions = mode.from_tensor(packing.positions)
        packing.blocks = [
            replace(
                block,
                queries=mode.from_tensor(block.queries),
                keys=mode.from_tensor(block.keys),
            )
            for block in packing.blocks
        ]
        fakes: dict[str, Any] = {name: mode.from_tensor(getattr(row, name)) for name in ROW_TENSORS}
        shown = row.pictures
        tokens, features = mode.from_tensor(shown.tokens), mode.from_tensor(shown.features)
        pictures = replace(shown, tokens=tokens, features=features)
        return replace(row, pictures=pictures, **fakes)

    return make_fake


def _peaks(policy: policy_rank.Policy, call: Callable[[], Any]) -> list[Parts]:
    """Returns the peak before the optimizer step, if `call` makes one, and the peak of the rest."""
    tracker, peaks = FSDPMemTracker(policy.model, policy.optimizer), []

    def end_phase(*_: Any) -> None:
        (parts,) = tracker.get_tracker_snapshot("peak").values()  # one device
        peaks.append({getattr(name, "value", name): num_bytes for name, num_bytes in parts.items()})
        tracker._peak_mem.clear()

    with tracker:
        handles = [
            policy.model.register_forward_pre_hook(
                lambda *_: tracker.reset_mod_stats(), prepend=True
            ),
            policy.optimizer.register_step_pre_hook(end_phase),
        ]
        call()
        end_phase()
    for handle in handles:
        handle.remove()
    return peaks
