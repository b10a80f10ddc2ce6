"""Scoring against decode-everything: CPU seconds of the reward pool beside the same rule on the whole text.

    python bench/reward.py [--model FOLDER] [--responses 4096] [--tokens 1500]

The peer is what a plain reward function does in one process: decode the whole response, then apply the rule. Ours
is `RewardPool` with its processes, whose CPU seconds count (starting them is shown apart). Both give the same
scores, or this fails. Without a model's tokenizer a byte-level BPE is trained on the generated text.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dapo_core.config import CustomRewardConfig, RewardConfig
from dapo_core.reward import RewardPool, Score, ScoreRequest, scorer_for

REQUIRED_RATIO = 4.0
SENTENCES = (
    "Let $x_{a}$ be the number of ways to choose {a} of {b} points on the circle.",
    "Then we have ${a} + {b} = {c}$, so the sum is divisible by {d}.",
    "Wait, that is not right: substituting $x = \\frac{{{a}}}{{{b}}}$ gives $\\sqrt{{{c}}}$ instead.",
    "By the triangle inequality, the length of $AB$ is at most {c} units.",
    "因此第{a}项等于{b}，我们再检查一遍。",
    "Therefore the remaining {d} cases are symmetric, and each contributes {b}.",
)
ENDS = ("Answer: {a}", "So the result is $\\boxed{{{a}}}$.", "Answer: $\\frac{{{a}}}{{{b}}}$", "I am not sure.")


def solution(rng: random.Random, num_sentences: int) -> str:
    """A text like a model's solution, which ends in an answer, or without one."""
    numbers = [{name: rng.randint(1, 999) for name in "abcd"} for _ in range(num_sentences + 1)]
    lines = [rng.choice(SENTENCES).format(**values) for values in numbers[1:]]
    return "\n".join([*lines, rng.choice(ENDS).format(**numbers[0])])


def trained_tokenizer(rng: random.Random) -> Any:
    """A byte-level BPE tokenizer with 8,000 tokens of text like ours."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([solution(rng, 40) for _ in range(500)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def measured(work: Callable[[], list[Score]]) -> tuple[list[Score], float, float]:
    """What the work returns, its CPU seconds and its wall seconds."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    scores = work()
    return scores, cpu_seconds() - cpu, time.perf_counter() - wall


def decode_everything(tokenizer: Any, requests: list[ScoreRequest]) -> list[Score]:
    """The peer: whole text, same rule, one process."""
    return [
        scorer_for(request.data_source)(
            str(tokenizer.decode(request.response_ids, skip_special_tokens=True)), request.ground_truth
        )
        for request in requests
    ]


def pooled(tokenizer: Any, requests: list[ScoreRequest], burst: int) -> list[Score]:
    """Ours, from starting the processes to their end; responses come in bursts, as from an engine."""
    pool = RewardPool(RewardConfig(num_processes=2), CustomRewardConfig(), tokenizer)
    scores: dict[str, Score] = {}
    for start in range(0, len(requests), burst):
        for position, request in enumerate(requests[start : start + burst], start):
            pool.submit(str(position), request)
        scores.update(pool.finished())
    while pool.num_pending:
        scores.update(pool.finished(1.0))
    pool.close()
    return [scores[str(position)] for position in range(len(requests))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder with a tokenizer; unset: one is trained here")
    parser.add_argument("--responses", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument(
        "--burst", type=int, default=16, help="responses that finish between two looks at the pool"
    )
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rng = random.Random(0)
    if arguments.model:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(arguments.model, local_files_only=True)
    else:
        tokenizer = trained_tokenizer(rng)
    requests = []
    for _ in range(arguments.responses):
        ids = tokenizer(solution(rng, arguments.tokens // 15)).input_ids[-arguments.tokens :]
        requests.append(ScoreRequest("math_dapo", ids, str(rng.randint(1, 999)), {}))
    num_tokens = sum(len(request.response_ids) for request in requests) / len(requests)
    print(f"{len(requests)} responses of {num_tokens:.0f} tokens, scorer math_dapo, best of {arguments.repeats}")
    peer_cpu, own_cpu, start_cpu = [], [], []
    for _ in range(arguments.repeats):
        peer_scores, cpu, _ = measured(lambda: decode_everything(tokenizer, requests))
        peer_cpu.append(cpu)
        own_scores, cpu, _ = measured(lambda: pooled(tokenizer, requests, arguments.burst))
        own_cpu.append(cpu)
        start_cpu.append(measured(lambda: pooled(tokenizer, [], 1))[1])
        assert own_scores == peer_scores
    peer, own, start = min(peer_cpu), min(own_cpu), min(start_cpu)
    print(f"decode everything, one process  {peer:7.3f} CPU s  {1e6 * peer / len(requests):7.1f} us a response")
    print(f"reward pool, with its start     {own:7.3f} CPU s  {1e6 * own / len(requests):7.1f} us a response")
    print(f"  of which starting the pool    {start:7.3f} CPU s  once a run")
    scoring = own - start
    print(f"ratio {peer / own:.2f} with the start, {peer / scoring:.2f} without; required {REQUIRED_RATIO:g}")
    print(
        "verdicts identical:",
        {v: sum(s.verdict == v for s in own_scores) for v in ("right", "wrong", "no_answer")},
    )
    sys.exit(peer / scoring < REQUIRED_RATIO)


if __name__ == "__main__":
    main()
