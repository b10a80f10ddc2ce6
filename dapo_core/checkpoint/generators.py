"""The random generators of a process as tensors, so that a continued training draws what would have come next."""

from __future__ import annotations

import random

import numpy as np
import torch


def generator_states(device_kind: str) -> dict[str, torch.Tensor]:
    """States of the global generators by name; that of an accelerator has the name of its kind."""
    of_numpy = np.random.get_state(legacy=False)
    _, words, next_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        # Words of 32 bits and the second half of a pair of normal draws: float64 holds both exactly.
        "numpy": torch.tensor(
            [*of_numpy["state"]["key"], of_numpy["state"]["pos"], of_numpy["has_gauss"], of_numpy["gauss"]],
            dtype=torch.float64,
        ),
        "python": torch.tensor([*words, next_gauss is not None, next_gauss or 0.0], dtype=torch.float64),
    }
    if device_kind != "cpu":
        states[device_kind] = torch.get_device_module(device_kind).get_rng_state()
    return states


def set_generators(states: dict[str, torch.Tensor]) -> None:
    """Put the named generators into their states; the others stay as they are."""
    for name, state in states.items():
        if name == "torch":
            torch.set_rng_state(state)
        elif name == "numpy":
            *keys, position, has_gauss, gauss = state.tolist()
            np.random.set_state(("MT19937", np.array(keys, np.uint32), int(position), int(has_gauss), gauss))
        elif name == "python":
            *words, has_gauss, gauss = state.tolist()
            random.setstate((3, tuple(map(int, words)), gauss if has_gauss else None))
        else:
            torch.get_device_module(name).set_rng_state(state)


def seed_generators(run_seed: int, rank: int, num_optimizer_steps: int) -> None:
    """Begin a stream of this rank's own in every generator, one that no other rank or number of steps begins."""
    words = np.random.SeedSequence((run_seed, rank, num_optimizer_steps)).generate_state(4)
    torch.manual_seed(int.from_bytes(words[:2].tobytes(), "little"))  # of accelerators as well
    np.random.seed(words)
    random.seed(words.tobytes())
