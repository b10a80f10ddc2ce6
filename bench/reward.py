"""Compares CPU seconds of the reward pool with decoding and scoring whole responses.

    python bench/reward.py [--model FOLDER] [--responses 4096] [--tokens 1500] [--data-source NAME]

The baseline decodes the whole response and applies the rule, like a plain reward function. The
pool's time includes any processes it starts. Fails if scores differ or the ratio is below the
required one.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dapo_core.config.training import CustomRewardConfig, RewardConfig
from dapo_core.model.pretrained import load_tokenizer
from dapo_core.reward.pool import RewardPool, ScoreRequest
from dapo_core.reward.scorers import DATA_SOURCES, SCORERS, Score
from tests.tiny_models import tiny_tokenizer

REQUIRED_RATIO = 4.0
GROUP_SIZE = 16
SENTENCES = (
    "Let $x_{a}$ be the number of ways to choose {a} of {b} points on the circle.",
    "Then we have ${a} + {b} = {c}$, so the sum is divisible by {d}.",
    "Wait, that is not right: substituting $x = \\frac{{{a}}}{{{b}}}$ gives $\\sqrt{{{c}}}$ "
    "instead.",
    "By the triangle inequality, the length of $AB$ is at most {c} units.",
    "因此第{a}项等于{b}，我们再检查一遍。",
    "Therefore the remaining {d} cases are symmetric, and each contributes {b}.",
)
ENDS = (
    "Answer: {a}",
    "So the result is $\\boxed{{{a}}}$.",
    "Answer: $\\frac{{{a}}}{{{b}}}$",
    "#### {a}",
    "I am not sure.",
)


def solution(rng: random.Random, num_sentences: int, answer: int) -> str:
    """Return a text like a model's solution that ends with or without an answer."""
    numbers = [{name: rng.randint(1, 999) for name in "abcd"} for _ in range(num_sentences + 1)]
    lines = [rng.choice(SENTENCES).format(**values) for values in numbers[1:]]
    return "\n".join([*lines, rng.choice(ENDS).format(**{**numbers[0], "a": answer})])


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its finished children."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measured(work: Callable[[], list[Score]]) -> tuple[list[Score], float]:
    """Return the result of `work` and its CPU seconds."""
    before = cpu_seconds()
    scores = work()
    return scores, cpu_seconds() - before


def decode_everything(tokenizer: Any, requests: list[ScoreRequest]) -> list[Score]:
    """Baseline: the whole text, the same rule, one process."""
    return [
        SCORERS[DATA_SOURCES[request.data_source]](
            str(tokenizer.decode(request.response_ids, skip_special_tokens=True)),
            request.ground_truth,
        )
        for request in requests
    ]


def pooled(tokenizer: Any, requests: list[ScoreRequest]) -> list[Score]:
    """The reward pool from start to close, polled after every response as a rollout worker does."""
    pool = RewardPool(RewardConfig(), CustomRewardConfig(), tokenizer)
    scores: dict[str, Score] = {}
    for position, request in enumerate(requests):
        pool.submit(str(position), request)
        scores.update(pool.finished())
    while pool.num_pending:
        scores.update(pool.finished(1.0))
    pool.close()
    return [scores[str(position)] for position in range(len(requests))]


def build_requests(
    tokenizer: Any, rng: random.Random, arguments: argparse.Namespace
) -> list[ScoreRequest]:
    """Build responses in groups that share the ground truth, in random order."""
    requests = []
    for position in range(arguments.responses):
        truth = 1 + position // GROUP_SIZE % 999
        text = solution(rng, arguments.tokens // 10, rng.choice([truth, 0]))
        ids = tokenizer(text).input_ids[-arguments.tokens :]
        requests.append(ScoreRequest(arguments.data_source, ids, str(truth)))
    rng.shuffle(requests)
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="folder with a tokenizer; unset: one is trained on similar text"
    )
    parser.add_argument("--responses", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--data-source", default="math_dapo", choices=["math_dapo", "openai/gsm8k"])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    rng = random.Random(0)
    tokenizer = (
        load_tokenizer(arguments.model)
        if arguments.model
        else tiny_tokenizer().train_new_from_iterator(
            [solution(rng, 40, 7) for _ in range(500)], 8000
        )
    )
    requests = build_requests(tokenizer, rng, arguments)
    num_tokens = sum(len(request.response_ids) for request in requests) / len(requests)
    print(f"{len(requests)} responses of {num_tokens:.0f} tokens, {arguments.data_source}")
    peer_cpu, own_cpu = [], []
    for _ in range(arguments.repeats):
        peer_scores, cpu = measured(lambda: decode_everything(tokenizer, requests))
        peer_cpu.append(cpu)
        own_scores, cpu = measured(lambda: pooled(tokenizer, requests))
        own_cpu.append(cpu)
        if own_scores != peer_scores:
            sys.exit("the scores differ")
    peer, own = min(peer_cpu), min(own_cpu)
    print(f"decode everything {peer:8.3f} CPU s {1e6 * peer / len(requests):8.1f} us a response")
    print(f"reward pool       {own:8.3f} CPU s {1e6 * own / len(requests):8.1f} us a response")
    print(
        f"ratio {peer / own:.2f}, required {REQUIRED_RATIO:g}; identical:",
        dict(Counter(s.verdict for s in own_scores)),
    )
    sys.exit(peer / own < REQUIRED_RATIO)


if __name__ == "__main__":
    main()
