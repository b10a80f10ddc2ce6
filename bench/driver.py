"""Measures what the driver holds and does with the responses of a step: memory and CPU time.

    .venv/bin/python bench/driver.py [--prompts 512] [--group-size 16] [--tokens 7385]

Groups come pickled, as from rollout workers through Ray; their responses have equal lengths. The
defaults are the sizes of the DAPO guide.
"""

from __future__ import annotations

import argparse
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import numpy as np
import psutil

from dapo_core.algorithm.batch import build_batch, shuffled
from dapo_core.checkpoint.state import TrainerState, state_files
from dapo_core.cluster.rollout_group import owned
from dapo_core.draw.account import Draw, TokenAccount
from dapo_core.draw.groups import Group, Rollout
from dapo_core.draw.prompts import Prompt
from dapo_core.metrics.step import draw_metrics
from dapo_core.model.inputs import ModelInput

PROMPT = Prompt(0, ModelInput(tuple(range(200))), "arithmetic", "1")

Result = TypeVar("Result")


def main() -> None:
    """Take a step through the driver; prints bytes per token and CPU seconds of each part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("prompts", 512), ("group-size", 16), ("tokens", 7385)):
        parser.add_argument(f"--{name}", type=int, default=default, help="(default: %(default)s)")
    sizes = parser.parse_args()
    num_tokens = sizes.prompts * sizes.group_size * sizes.tokens
    process = psutil.Process()
    sent = [
        as_sent(make_group(number, sizes.group_size, sizes.tokens))
        for number in range(sizes.prompts)
    ]
    before = process.memory_full_info().uss
    groups = timed("receive", lambda: [received(*each) for each in sent])
    held = process.memory_full_info().uss - before
    print(f"{num_tokens:,} tokens in {held / 2**30:.2f} GiB: {held / num_tokens:.1f} bytes each")
    timed("metrics", lambda: draw_metrics(Draw(groups, sizes.prompts, TokenAccount()), 1, 1))
    timed("pack", lambda: build_batch(shuffled(groups, 0, 1), mask_truncated=False))
    state = TrainerState(1, 1, 0, groups, [], 0.0, {}, {})
    timed("keep as carried over", lambda: state_files(state))


def make_group(number: int, group_size: int, num_tokens: int) -> Group:
    """Return a group of scored responses with random tokens."""
    draw = np.random.default_rng(number)
    rollouts = [
        Rollout(
            response_ids=draw.integers(150_000, size=num_tokens, dtype=np.int32),
            rollout_log_probs=-draw.random(num_tokens, np.float32),
            finish_reason="stop",
            score=1.0,
            overlong_penalty=0.0,
            verdict="right",
            acc=1.0,
            versions=[(0, num_tokens)],
        )
        for _ in range(group_size)
    ]
    return Group(number, PROMPT, rollouts)


def as_sent(group: Group) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Pickle a group as Ray does: arrays stay beside the pickle, as buffers in shared memory."""
    buffers: list[pickle.PickleBuffer] = []
    return pickle.dumps(group, protocol=5, buffer_callback=buffers.append), buffers


def received(content: bytes, buffers: list[pickle.PickleBuffer]) -> Group:
    """Return a group as RolloutGroup does."""
    group: Group = pickle.loads(content, buffers=buffers)
    return replace(group, rollouts=owned(group.rollouts))


def timed(part: str, call: Callable[[], Result]) -> Result:
    """Print the CPU seconds of a call, which other processes affect least.

    The second call counts, as a second step does: a virtual machine may take seconds to back memory
    that no process has used before.
    """
    call()
    started = time.process_time()
    result = call()
    print(f"{part}: {time.process_time() - started:.2f} s")
    return result


if __name__ == "__main__":
    main()
