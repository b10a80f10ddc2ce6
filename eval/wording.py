"""What a comparison says in sentences: for people who quote one, and for those who check it."""

from __future__ import annotations

from eval.compare import SIGNIFICANCE, Comparison


def verdict(comparison: Comparison) -> str:
    """What happened, its size with interval, on how many items, and the test; never a size without an interval."""
    x, y = percent(comparison.before.accuracy), percent(comparison.after.accuracy)
    if comparison.is_one_evaluation:
        return (
            f"Both sides are the same stored evaluation, {x} right on {_items(comparison)}: nothing was measured "
            f"twice, so nothing can be said about a change."
        )
    low, high = (points(bound) for bound in comparison.ci95)
    if comparison.is_significant:
        verb = "rose" if comparison.difference > 0 else "fell"
        size = f"{100 * abs(comparison.difference):.1f} points (95 % interval of the change {low} to {high})"
        first = f"Accuracy {verb} by {size}, from {x} to {y} on {_items(comparison)}: {_evidence(comparison)}."
        return " ".join([first, *_left_out(comparison)])
    first = (
        f"No significant change in accuracy: {x} before, {y} after, {points(comparison.difference)} points "
        f"(95 % interval {low} to {high}) on {_items(comparison)}: {_evidence(comparison)}."
    )
    detectable = comparison.minimal_detectable_difference
    missed = (
        f"with these items, a true change of less than about {100 * detectable:.1f} points is missed more than "
        f"one time in five"
        if detectable < 1
        else "with so few items, no change is found reliably, however large"
    )
    second = f"That does not show that nothing changed: {missed}."
    return " ".join([first, second, *_left_out(comparison)])


def notes(comparison: Comparison) -> list[str]:
    """What a careful reader must know besides, as sentences; empty when there is nothing."""
    if comparison.is_one_evaluation:
        return []
    low, high = comparison.ci95
    found = []
    if comparison.before.model == comparison.after.model:
        found.append(
            "Both sides are the same model: whatever changed is the noise of serving and sampling, not training."
        )
    if (low > 0 or high < 0) != comparison.is_significant:
        found.append(
            f"Borderline: the interval {'leaves out' if low > 0 or high < 0 else 'contains'} zero, yet the exact "
            f'test {"rejects" if comparison.is_significant else "does not reject"} "no change". More items or '
            f"samples decide, not the choice of the test."
        )
    if comparison.interval_method == "adjusted Wald":
        found.append(
            "No two items changed differently, so a bootstrap has no width; the interval is the adjusted Wald one."
        )
    other = comparison.rulers
    if other.before == other.after == 0 < max(comparison.before.accuracy, comparison.after.accuracy):
        found.append(
            "AISBench's rule calls no response of either side right: it reads \\boxed{} and 'answer is', and "
            "these responses give their answers in another form. Its figures say nothing here."
        )
    elif (other.p < SIGNIFICANCE) != comparison.is_significant:
        found.append(
            f"The rulers differ: under AISBench's string rule the change is {points(other.difference)} points "
            f"(95 % interval {points(other.ci95[0])} to {points(other.ci95[1])}, p {format_p(other.p)})."
        )
    found.append(
        "This compares these two models on items like these. It does not tell how another training with another "
        "seed would end."
    )
    return found


def percent(share: float) -> str:
    """A share as "81.8 %"."""
    return f"{100 * share:.1f} %"


def points(share: float) -> str:
    """A difference of shares in signed percentage points; never "-0.0"."""
    return f"{round(100 * share, 1) + 0.0:+.1f}"


def format_p(p: float) -> str:
    """A p-value with its relation sign, e.g. "= 0.0051" or "< 0.0001"."""
    return "< 0.0001" if p < 0.0001 else f"= {p:.2g}" if p < 0.995 else "= 1"


def _items(comparison: Comparison) -> str:
    plural = "s" if comparison.n > 1 else ""
    if comparison.num_samples == 1:
        return f"the same {comparison.n} item{plural}"
    return f"the same {comparison.n} item{plural}, {comparison.num_samples} responses each"


def _evidence(comparison: Comparison) -> str:
    words = ("gained", "lost") if comparison.num_samples == 1 else ("items better", "worse")
    counts = f"{comparison.c} {words[0]}, {comparison.b} {words[1]}"
    return f"{counts}, {comparison.test} p {format_p(comparison.p)}"


def _left_out(comparison: Comparison) -> list[str]:
    unpaired = comparison.unpaired
    if not unpaired.num_items:
        return []
    total = comparison.n + unpaired.num_items
    low, high = (points(bound) for bound in unpaired.difference_range)
    verb = "item is" if unpaired.num_items == 1 else "items are"
    return [
        f"{unpaired.num_items} further {verb} left out because a request failed ({unpaired.before} before, "
        f"{unpaired.after} after); whatever the answers would have been, the change over all {total} items lies "
        f"between {low} and {high} points."
    ]
