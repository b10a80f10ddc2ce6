"""The registered sets and suites by name."""

from __future__ import annotations

from downloads.nearest import nearest
from eval.problems import ProblemsError
from eval.problems.rows import CHAT, ProblemSet
from eval.problems.sets.mathematics import ARITHMETIC, BENCHMARKS, SHAPES, TRAINING_SETS
from eval.problems.sets.multiple_choice import CFLUE, CHOICE, GPQA_DIAMOND

_SETS = (*TRAINING_SETS, CFLUE, ARITHMETIC, SHAPES, CHOICE, *BENCHMARKS, GPQA_DIAMOND)
SETS: dict[str, ProblemSet] = {known.name: known for known in _SETS}
SUITES: dict[str, tuple[str, ...]] = {
    "math": ("math500", "aime24", "aime25", "amc23", "olympiadbench", "minerva")
}
POOLED = "pooled"  # names all benchmarks of a suite together
OWN = ProblemSet("own", "your own file", "yours", (CHAT,))


def find_set(name: str) -> ProblemSet:
    """Return the registered set of that name. Raises ProblemsError with the closest match."""
    if name not in SETS:
        raise ProblemsError(f"the registry has no set {name}{nearest(name, tuple(SETS))}")
    return SETS[name]


def find_suite(name: str) -> tuple[str, ...]:
    """Return the names of a suite's sets. Raises ProblemsError with the known suites."""
    if name not in SUITES:
        raise ProblemsError(
            f"{name!r} is not a suite; known: {', '.join(SUITES)}. To evaluate a single set, use "
            "--dataset"
        )
    return SUITES[name]
