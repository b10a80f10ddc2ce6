"""Did it get better? Paired comparison of the scores of two evaluations, item by item.

    from eval import paired

    result = paired.compare(before, after)
    print(result.verdict, result.difference, result.ci95, result.p)
    print(result.markdown())

The item is the statistical unit: its samples are averaged, and its change d_i is the mean after
minus the mean before. The difference is the mean of d_1 ... d_n. The test is the exact two-sided
sign-flip test, p = P(|sum of s_i d_i| >= |sum of d_i|) over all 2**n signs s_i (Fisher, The Design
of Experiments, 1935, section 21), which is McNemar's (Psychometrika 12:153, 1947) for single
right-or-wrong responses. The interval contains zero exactly if p is at least 0.05: it is Tango's
(Stat Med 17:891, 1998), extended to samples by empirical likelihood. Over several benchmarks
p-values are adjusted by Holm's method (Scand J Stat 6:65, 1979). The pooled change is the mean over
benchmarks, with a stratified test and a MOVER interval (Zou et al., Comput Stat Data Anal 53:1080,
2009). `eval.results.statistics` has the arithmetic.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from durable import write_atomically
from eval.problems.registry import POOLED
from eval.report.gates import ACCURACY, AFTER, BEFORE, GateResult, check_gate, describe_gates
from eval.report.gates import parse_gate as parse
from eval.report.pages import format_p, percent, plain_p, points, render
from eval.results.rows import make_folder
from eval.results.scores import Response, ScoresError, is_table, read_responses
from eval.results.statistics import (
    SIGNIFICANCE,
    PairedChange,
    Stratum,
    holm,
    measure_change,
    measure_pooled_change,
)

MAX_RESPONSE_CHARS = 6000  # kept of a text, from its end
_MOST_UNITS = 2**17  # sum of all changes; finer scores are rounded to it
_SAME = 1e-9  # means that differ by less are equal
_PARTS = (1, 2, 10, 100)  # of a score: scores such as 0.5, 0.3 and 0.25 stay exact


Items = dict[str, list[Response]]  # the scored responses to each item, by sample
Pair = tuple[list[Response], list[Response]]  # of one item, as many before as after


@dataclass(frozen=True)
class Change(PairedChange):
    """The change of one benchmark's mean score, or the pooled one. `n` counts items.

    Scores within 0 and 1 are shares; others keep their own unit.
    """

    name: str
    before: float
    after: float
    samples: tuple[int, int]  # fewest and most of an item
    num_better: int  # items
    num_worse: int
    is_share: bool
    is_lower_better: bool
    p_holm: float = 1.0

    @property
    def label(self) -> str:
        """The name, with an arrow if lower scores are better."""
        return (self.name or "all") + " ↓" * self.is_lower_better

    @property
    def is_gain(self) -> bool:
        """True if the mean score moved towards better."""
        return self.difference < 0 if self.is_lower_better else self.difference > 0

    @property
    def direction(self) -> str:
        """`better` or `worse` if the adjusted p is below 0.05, else empty."""
        return ("better" if self.is_gain else "worse") if self.p_holm < SIGNIFICANCE else ""

    def level(self, score: float) -> str:
        """A mean score as text: 61.2 %, or 7.31."""
        return percent(score) if self.is_share else f"{score:.4g}"

    def size(self, difference: float) -> str:
        """A difference as signed text: +1.5, in points or in units of the score."""
        return points(difference) if self.is_share else f"{difference:+.3g}"

    @property
    def interval(self) -> str:
        """The 95 % interval of the difference as text."""
        return " to ".join(map(self.size, self.ci95))


@dataclass(frozen=True)
class Flip:
    """An item whose mean score changed, with a response of each side that shows it."""

    benchmark: str
    item: str
    before: float
    after: float
    is_gain: bool
    problem: str | None
    gold: str | None
    response_before: str | None
    response_after: str | None


@dataclass(frozen=True)
class Result:
    """What `compare` found. Flips come with the largest changes first."""

    benchmarks: tuple[Change, ...]
    pooled: Change | None  # None for one benchmark, or if units or directions differ
    better: tuple[Flip, ...]
    worse: tuple[Flip, ...]
    notes: tuple[str, ...] = ()
    gates: tuple[GateResult, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)  # label -> what was compared

    @property
    def total(self) -> Change | None:
        """The change that decides: of the only benchmark, or the pooled one."""
        return self.benchmarks[0] if len(self.benchmarks) == 1 else self.pooled

    @property
    def rows(self) -> list[Change]:
        """The benchmarks, then the pooled change if there is one."""
        return [*self.benchmarks, *([self.pooled] if self.pooled else [])]

    @property
    def difference(self) -> float:
        """After minus before, of the mean score. Raises ScoresError without a pooled change."""
        return self._decisive.difference

    @property
    def ci95(self) -> tuple[float, float]:
        """95 % interval of the difference."""
        return self._decisive.ci95

    @property
    def p(self) -> float:
        """Two-sided p-value of "no change"."""
        return self._decisive.p

    @property
    def detectable(self) -> float:
        """The smallest true difference that is detected with 80 % power."""
        return self._decisive.detectable

    @property
    def direction(self) -> str:
        """`better`, `worse`, or empty if the change is not significant."""
        return self._decisive.direction

    @property
    def _decisive(self) -> Change:
        if self.total is None:
            raise ScoresError(
                "the benchmarks have no pooled change, because the units or directions of their "
                "scores differ; read `benchmarks`"
            )
        return self.total

    @property
    def is_failed(self) -> bool:
        """True if a gate failed."""
        return any(gate.is_passed is False for gate in self.gates)

    @property
    def sentences(self) -> list[str]:
        """The verdict: the change, benchmarks that rose or fell, and gates."""
        found = [_verdict(self.total, len(self.benchmarks))] if self.total else []
        if len(self.benchmarks) > 1:
            for word, is_gain in (("Worse", False), ("Better", True)):
                rows = [row for row in self.benchmarks if row.is_gain is is_gain]
                found += _named(word, [row for row in rows if row.direction])
                unsure = [row for row in rows if row.p < SIGNIFICANCE and not row.direction]
                found += _named(f"{word} before Holm's adjustment only", unsure)
        if self.total is None and len(found) == 0:
            found = ["No benchmark changed significantly."]
        return [*found, *describe_gates(self.gates)]

    @property
    def verdict(self) -> str:
        """The sentences as one text."""
        return " ".join(self.sentences)

    def described(self, about: Mapping[str, str], notes: Sequence[str]) -> Result:
        """Add what was compared, and notes before the others."""
        return replace(self, about=about, notes=(*notes, *self.notes))

    def check(self, gates: Sequence[str]) -> Result:
        """Add gates such as "gsm8k >= before - 1". Raises GateError for unknown names."""
        names = [row.name for row in self.benchmarks if row.name]
        values = {
            row.name: (_metrics(row, row.before), _metrics(row, row.after)) for row in self.rows
        }
        if self.total:
            values[POOLED] = values[self.total.name]
        measured = {BEFORE: values, AFTER: values}
        checked = [check_gate(parse(gate, names, [BEFORE]), measured) for gate in gates]
        return replace(self, gates=tuple(checked))

    def to_json(self) -> dict[str, Any]:
        """The content of report.json."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        return {
            "verdict": self.verdict,
            "direction": self.total.direction if self.total else None,
            **{name: _plain(value) for name, value in own.items()},
        }

    def markdown(self) -> str:
        """The report as Markdown in 100 columns."""
        return render("paired.md.j2", result=self)

    def html(self) -> str:
        """The report as one self-contained page without scripts."""
        return render("paired.html.j2", result=self)

    def write(self, folder: str | Path) -> None:
        """Write report.json, report.md and report.html."""
        files = {
            "report.json": json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n",
            "report.md": self.markdown(),
            "report.html": self.html(),
        }
        for name, text in files.items():
            write_atomically(make_folder(folder) / name, text.encode(errors="replace"))


def compare(before: Any, after: Any, lower_is_better: bool | Collection[str] = False) -> Result:
    """Compare the scores of two evaluations of the same items.

    `before` and `after` are arrays of shape [items] or [items, samples], {benchmark: array}, or
    tables with the columns item and score (`eval.results.scores.read_responses`). Higher scores are
    better, except of the benchmarks named in `lower_is_better`, or all if it is True. Items and
    benchmarks of one side only, responses without a score and surplus samples are left out and
    counted in `notes`. Raises ScoresError if nothing can be paired, or if an item's problem or gold
    answer differs.
    """
    sides = [
        _by_benchmark(read_responses(one, label), label)
        for one, label in ((before, BEFORE), (after, AFTER))
    ]
    names = [name for name in sides[1] if name in sides[0]]
    if not names:
        listed = [", ".join(name or "one without a name" for name in side) for side in sides]
        raise ScoresError(
            f"the two sides have no common benchmark: {listed[0]} before; {listed[1]} after"
        )
    if POOLED in names and len(names) > 1:
        raise ScoresError(
            f"a benchmark is named {POOLED}, which stands for all {len(names)} together; rename it"
        )
    lower = names if lower_is_better is True else lower_is_better or ()
    lower = [lower] if isinstance(lower, str) else lower
    if unknown := [name for name in lower if name not in names]:
        raise ScoresError(f"lower_is_better: no benchmark {', '.join(unknown)} on both sides")
    if not (is_table(before) or is_table(after)):
        _require_same_length(names, *sides)
    pairs = {name: _pair(name, sides[0][name], sides[1][name]) for name in names}
    changes = [_measure(name, items, name in lower) for name, items in pairs.items()]
    adjusted = holm([change.p for change in changes])
    benchmarks = tuple(replace(one, p_holm=p) for one, p in zip(changes, adjusted, strict=True))
    flips = sorted(
        (flip for name in names for flip in _flips(name, pairs[name], name in lower)),
        key=lambda flip: -abs(flip.after - flip.before),
    )
    return Result(
        benchmarks,
        _pool(benchmarks, [pairs[name] for name in names]),
        better=tuple(flip for flip in flips if flip.is_gain),
        worse=tuple(flip for flip in flips if not flip.is_gain),
        notes=tuple(_left_out(sides, pairs)),
    )


def _by_benchmark(responses: Iterable[Response], label: str) -> dict[str, Items]:
    """Group scored responses. Raises ScoresError for a sample given twice."""
    found: dict[str, Items] = {}
    seen: set[tuple[str, str, str]] = set()
    for one in responses:
        samples = found.setdefault(one.benchmark, {}).setdefault(one.item, [])
        if one.sample is not None:
            key = (one.benchmark, one.item, one.sample)
            if key in seen:
                raise ScoresError(
                    f"{label}: item {one.item!r} has two scores for sample {one.sample!r}; each "
                    "response has one row"
                )
            seen.add(key)
        if one.score is not None:
            samples.append(one)
    return found


def _require_same_length(
    names: Sequence[str], before: Mapping[str, Items], after: Mapping[str, Items]
) -> None:
    """Raise ScoresError for arrays of different lengths: which items they share is not known."""
    for name in names:
        lengths = len(before[name]), len(after[name])
        if lengths[0] != lengths[1]:
            place = f"{name}: " if name else ""
            raise ScoresError(
                f"{place}{lengths[0]} items before and {lengths[1]} after: arrays hold the same "
                "items in the same order; give tables with item and score if some are missing"
            )


def _pair(name: str, before: Items, after: Items) -> dict[str, Pair]:
    """Pair a benchmark's items. Raises ScoresError without any, or if their texts differ."""
    place = f"{name}: " if name else ""
    shared = [item for item in before if before[item] and after.get(item)]
    if not shared:
        raise ScoresError(
            f"{place}none of {len(before)} items before and {len(after)} after are scored on both "
            f"sides (first: {next(iter(before))!r} and {next(iter(after))!r}): compare evaluations "
            "of the same items"
        )
    for text in ("problem", "gold"):
        known = [
            (item, getattr(before[item][0], text), getattr(after[item][0], text)) for item in shared
        ]
        changed = [item for item, x, y in known if x is not None and y is not None and x != y]
        if changed:
            raise ScoresError(
                f"{place}the {text} differs in {len(changed)} of {len(shared)} items of the same "
                f"name (first: {changed[0]!r}): these are not the same items. Was the data set "
                "changed or shuffled?"
            )
    sizes = {item: min(len(before[item]), len(after[item])) for item in shared}
    return {item: (before[item][:k], after[item][:k]) for item, k in sizes.items()}


def _mean(samples: Sequence[Response]) -> float:
    return math.fsum(one.score or 0.0 for one in samples) / len(samples)


def _measure(name: str, pairs: Mapping[str, Pair], is_lower_better: bool) -> Change:
    """Measure a benchmark's change on its lattice (`_lattice`), in units of the score."""
    scores = [one.score or 0.0 for pair in pairs.values() for side in pair for one in side]
    is_share = min(scores) >= 0 and max(scores) <= 1
    scale = 1.0 if is_share else max(scores) - min(scores) or 1.0
    before, after = (np.array([_mean(pair[side]) for pair in pairs.values()]) for side in (0, 1))
    sizes = {len(x) for x, _ in pairs.values()}
    changes, denominator = _lattice((after - before) / scale, sizes)
    found = measure_change(changes, denominator)
    low, high = found.ci95
    gains = before - after if is_lower_better else after - before
    return Change(
        n=found.n,
        difference=float((after - before).mean()),
        ci95=(low * scale, high * scale),
        p=found.p,
        mid_p=found.mid_p,
        detectable=found.detectable * scale,
        name=name,
        before=float(before.mean()),
        after=float(after.mean()),
        samples=(min(sizes), max(sizes)),
        num_better=int((gains > _SAME).sum()),
        num_worse=int((gains < -_SAME).sum()),
        is_share=is_share,
        is_lower_better=is_lower_better,
    )


def _lattice(changes: np.ndarray, sizes: Iterable[int]) -> tuple[list[int], int]:
    """Changes [n] of items as whole numbers of 1/denominator, and the denominator.

    Means of `sizes` samples with coarse scores are exact. Finer ones are rounded to a unit at which
    all changes sum to 2**17 at most; the sign-flip test of rounded changes is still exact.
    """
    whole = math.lcm(*sizes)
    total = float(np.abs(changes).sum())
    for denominator in (whole * part for part in _PARTS):
        if total * denominator > _MOST_UNITS:
            break
        units = changes * denominator
        if np.allclose(units, np.rint(units), rtol=0, atol=1e-6):
            return np.rint(units).astype(int).tolist(), denominator
    denominator = max(1, int(_MOST_UNITS / total))
    return np.rint(changes * denominator).astype(int).tolist(), denominator


def _pool(benchmarks: Sequence[Change], pairs: Sequence[Mapping[str, Pair]]) -> Change | None:
    """The mean change over benchmarks; None for one, or unless all are shares of one direction."""
    kinds = {(row.is_share, row.is_lower_better) for row in benchmarks}
    if len(benchmarks) == 1 or len(kinds) > 1 or not benchmarks[0].is_share:
        return None
    strata = []
    for items in pairs:
        changes = np.array([_mean(y) - _mean(x) for x, y in items.values()])
        strata.append(Stratum(*_lattice(changes, {len(x) for x, _ in items.values()}), weight=1.0))
    found = measure_pooled_change(strata)
    return Change(
        **vars(found),
        name=POOLED,
        before=sum(row.before for row in benchmarks) / len(benchmarks),
        after=sum(row.after for row in benchmarks) / len(benchmarks),
        samples=(
            min(row.samples[0] for row in benchmarks),
            max(row.samples[1] for row in benchmarks),
        ),
        num_better=sum(row.num_better for row in benchmarks),
        num_worse=sum(row.num_worse for row in benchmarks),
        is_share=True,
        is_lower_better=benchmarks[0].is_lower_better,
        p_holm=found.p,
    )


def _flips(name: str, pairs: Mapping[str, Pair], is_lower_better: bool) -> Iterable[Flip]:
    """The items whose mean changed, each with the two most different responses."""
    for item, (before, after) in pairs.items():
        x, y = _mean(before), _mean(after)
        if abs(x - y) <= _SAME:
            continue
        low, high = (before, after) if y > x else (after, before)
        worst = min(low, key=lambda one: one.score or 0.0)
        best = max(high, key=lambda one: one.score or 0.0)
        old, new = (worst, best) if y > x else (best, worst)
        texts = old.problem, old.gold, old.response, new.response
        is_gain = (y < x) == is_lower_better
        yield Flip(
            name, item, x, y, is_gain, *(text and text[-MAX_RESPONSE_CHARS:] for text in texts)
        )


def _left_out(
    sides: Sequence[Mapping[str, Items]], pairs: Mapping[str, Mapping[str, Pair]]
) -> Iterable[str]:
    """Sentences on what is not compared: benchmarks, items and samples; or if all is equal."""
    everything = [pair for items in pairs.values() for pair in items.values()]
    if all([one.score for one in x] == [one.score for one in y] for x, y in everything):
        yield "All scores are equal on both sides: is it the same evaluation?"
    for label, side, other in ((BEFORE, sides[0], sides[1]), (AFTER, sides[1], sides[0])):
        if only := [name for name in side if name not in other]:
            yield f"Only {label}, and not compared: {', '.join(only)}."
    for name, items in pairs.items():
        place = f"{name}: " if name else ""
        missing = [len(side[name]) - len(items) for side in sides]
        if any(missing):
            yield (
                f"{place}items without a scored counterpart, left out: {missing[0]} before, "
                f"{missing[1]} after."
            )
        surplus = [
            sum(len(samples) for item, samples in side[name].items() if item in items)
            - sum(len(pair[0]) for pair in items.values())
            for side in sides
        ]
        if any(surplus):
            yield (
                f"{place}samples without a counterpart, left out: {surplus[0]} before, "
                f"{surplus[1]} after."
            )


def _verdict(total: Change, num_benchmarks: int) -> str:
    """One sentence on the change, and one on what was not detectable."""
    low, high = total.samples
    repeats = "" if high == 1 else f", {low if low == high else f'{low} to {high}'} samples each"
    scope = f"pooled over {num_benchmarks} benchmarks, " if num_benchmarks > 1 else ""
    scope = "lower is better, " * total.is_lower_better + scope
    unit = " points" if total.is_share else ""
    plural = "" if total.n == 1 else "s"
    facts = (
        f"{scope}{total.level(total.before)} before, {total.level(total.after)} after, "
        f"{total.size(total.difference)}{unit} (95 % interval {total.interval}) on {total.n:,} "
        f"item{plural}{repeats}: {total.num_better:,} better, {total.num_worse:,} worse, exact "
        f"two-sided p {format_p(total.p)}."
    )
    if total.direction:
        return f"{total.direction.capitalize()}: {facts}"
    limit = total.size(total.detectable).lstrip("+")
    most = 1.0 if total.is_share else math.inf
    undetected = (
        f"A true change below about {limit}{unit} goes undetected more than one time in five."
        if total.detectable < most
        else "With so few items, no change is detected reliably, however large."
    )
    return f"No significant change: {facts} {undetected}"


def _named(word: str, rows: Sequence[Change]) -> list[str]:
    """A sentence that names benchmarks with their changes; none without any."""
    listed = "; ".join(
        f"{row.label} {row.size(row.difference)} (p {format_p(row.p)}, Holm {plain_p(row.p_holm)})"
        for row in rows
    )
    return [f"{word}: {listed}."] if rows else []


def _metrics(row: Change, score: float) -> dict[str, float | None]:
    """The metrics that gates may name; shares in percent."""
    return {ACCURACY: 100 * score if row.is_share else score}


def _plain(value: Any) -> Any:
    """Dataclasses as dicts, in tuples too."""
    if isinstance(value, tuple):
        return [asdict(one) if hasattr(one, "__dataclass_fields__") else one for one in value]
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
