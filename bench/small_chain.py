"""Overrides that cut the demo recipe to seconds per stage, for tests and measurements of the rest
of the chain.
"""

from __future__ import annotations

CONFIG = "configs/arith_cpu.yaml"
SMALL = (
    "data.arithmetic.num_train=128",
    "data.arithmetic.num_eval=24",
    "model.recipe.num_steps=20",
    "sampler.dynamic=false",
    "sampler.gen_prompts=4",
    "rollout.engine=hf",
    "rollout.group_size=4",
    "train.num_ranks=1",
    "train.total_steps=2",
    "train.train_prompts=4",
    "train.mini_prompts=4",
)
