"""Whether a training has anything to learn from, judged by the stored answers of its model.

Where the training's scorer gives all of them the same value, so it does within groups, and dynamic
sampling draws until it gives up.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq

from dapo_core.draw.texts import shortened
from dapo_core.reward.scorers import Score
from eval.answers.pool import CallFailed, CallTimedOut, StartFailed
from eval.results.rows import Row, read_rows
from eval.results.suite import read_suite
from tasks.artifacts.artifact import Artifact
from tasks.config import ChainConfig
from tasks.data.layout import EVAL_FILE, TRAIN_FILE, benchmark_file
from tasks.evaluation.settings import set_of
from tasks.links import link_of
from tasks.preflight.finding import FAIL, OK, WARN, Finding, Findings, describe
from tasks.preflight.prompts import NUM_SCORED, asked_forms, gold_responses, text_of
from tasks.preflight.scoring import Scoring
from tasks.runs.plan import has_output
from tasks.runs.run import Run, require_outputs

if TYPE_CHECKING:
    from eval.problems.items import EvaluationSet, Item

logger = logging.getLogger(__name__)

NUM_JUDGED, JUDGE_SECONDS = 200, 30.0  # answers per benchmark that the scorer reads
NUM_CERTAIN = 50  # answers that can stop a run; fewer only warn
NUM_DIFFERENT = 5  # answers on which scorer and grader disagree: they read different forms
EQUAL_SHARE = 0.95  # of answers with one value, or unread, that is as good as all
NUM_SHOWN = 2
MAX_CHARACTERS = 10_000  # of an answer's end that the scorer reads
TRAIN_ANYWAY = "To train nevertheless: dapo stage train-policy CONFIG, then dapo run again"
ADVICE = {
    "failed": "correct the file of custom_reward.path, unless it needs what only the rows of "
    "data.train have",
    "differ": "make prompts and scorer agree: ask for the form that the scorer reads "
    "(data.prompt_template, evaluate.prompt), choose another scorer (reward.scorers; exact reads "
    "every form), or correct the file of custom_reward.path",
    "cut": "raise rollout.max_response_tokens and evaluate.max_response_tokens, or use a model "
    "that ends its answers",
    "unread": "ask for an answer in a form that the scorer reads, with solved examples if need be "
    "(data.prompt_template, evaluate.prompt, model.chat_template), or use a model that follows "
    "instructions",
    "hard": "unless the training's problems are easier, use easier ones, or show solved examples "
    "in the prompt (data.prompt_template)",
    "easy": "unless the training's problems are harder, use harder ones",
}


@dataclass(frozen=True)
class Judged:
    """A stored answer, and what the training's scorer says of it."""

    row: Row
    score: Score

    @property
    def is_scored(self) -> bool:
        """Whether the scorer succeeded."""
        return self.score.verdict not in ("error", "timeout")


def require_signal(run: Run, data: Artifact, model: Artifact, before: Artifact) -> None:
    """Raise PreflightError if the answers before training prove that it would learn nothing.

    A training that is in the store, or elsewhere, is not questioned.
    """
    if run.config.is_adopted:
        return
    key = link_of(run.config, "train_policy").key(data, model)
    if run.store.lookup(key.stage, key.key) is not None:
        return
    findings = examine_signal(run.config, data, before)
    for finding in findings:
        if finding.status != FAIL:  # which is raised
            log = logger.info if finding.status == OK else logger.warning
            log("%s", describe([finding])[0])
    findings.require()


def examine_signal(config: ChainConfig, data: Artifact, before: Artifact) -> Findings:
    """Let the training's scorer read the answers in `before`: one finding per benchmark.

    Fails only if no benchmark has signal. Benchmarks that it cannot judge are logged.
    """
    findings, folder = Findings(), Path(data.path)
    with findings.catching("signal"), closing(Scoring(config)) as scoring:
        training = Training.read(folder / TRAIN_FILE)
        for name, results in read_suite(before.path).items():
            named = config.evaluate.named.get(name)
            own = config.for_benchmark(named) if named else config
            if own.evaluate.mode == "loglikelihood":  # nothing was generated
                continue
            problems = folder / (benchmark_file(name) if named else EVAL_FILE)
            asked = set_of(own.evaluate, problems)
            judged = judge(asked.items, results, training, scoring)
            if judged:
                is_alike = training.asks_like(asked)
                found = conclude(judged, is_alike, own)
                findings.append(replace(found, where=name if named else ""))
            else:
                logger.info("signal: the training's scorer cannot judge the answers to %s", name)
    if any(finding.status == OK for finding in findings):
        findings[:] = [replace(one, status=WARN) if one.status == FAIL else one for one in findings]
    return findings


def examine_stored_signal(config: ChainConfig) -> Findings:
    """Like `examine_signal` for the recipe's stored evaluation; empty if the store has none."""
    if not has_output(config, "evaluate_before"):
        return Findings()
    found = require_outputs(config, ("prepare_data", "evaluate_before"))
    return examine_signal(config, found["prepare_data"], found["evaluate_before"])


@dataclass(frozen=True)
class Training:
    """What a training scores: the data sources of its rows, and a prompt."""

    sources: frozenset[str]
    prompt: str

    @staticmethod
    def read(path: Path) -> Training:
        """Read the prepared rows."""
        sources = pq.read_table(path, columns=["data_source"])["data_source"].unique().to_pylist()
        with pq.ParquetFile(path) as file:
            first = next(file.iter_batches(1, columns=["prompt"])).to_pylist()[0]
        return Training(frozenset(map(str, sources)), text_of(first["prompt"]))

    def asks_like(self, asked: EvaluationSet) -> bool:
        """True if the evaluation asks for answers in the same form, as far as prompts show it."""
        forms = asked_forms(text_of(asked.items[0].prompt))
        is_given = asked.template.name == "given"  # prepared as training's prompts are
        return forms == asked_forms(self.prompt) and (bool(forms) or is_given)


def judge(
    items: Sequence[Item], results: Path, training: Training, scoring: Scoring
) -> list[Judged]:
    """Score a selection of the stored answers, evenly spaced; [] if the scorer cannot judge them.

    Items of another data source than training's are judged by the training's only scorer, if that
    accepts their gold answers in some form.
    """
    by_id, deadline = {item.id: item for item in items}, time.monotonic() + JUDGE_SECONDS
    known = {str(item.data_source) for item in items} & training.sources
    scorers = {scoring.name(source) for source in training.sources}
    other = min(training.sources)
    if not known and (len(scorers) > 1 or not _accepts_golds(items, other, scoring)):
        return []
    rows = [row for row in read_rows(results, MAX_CHARACTERS).values() if row.is_answered]
    judged = []
    for row in rows[:: max(1, len(rows) // NUM_JUDGED)]:
        item = by_id.get(row.id)
        if item is None or time.monotonic() > deadline:
            continue
        source = str(item.data_source) if item.data_source in known else other
        if source in known or not known:
            judged.append(Judged(row, _score(scoring, source, row.text or "", item)))
    return judged


def _accepts_golds(items: Sequence[Item], source: str, scoring: Scoring) -> bool:
    return all(
        any(
            _score(scoring, source, response, item).verdict == "right"
            for _, response in gold_responses(item)
        )
        for item in items[:NUM_SCORED]
    )


def _score(scoring: Scoring, source: str, response: str, item: Item) -> Score:
    try:
        return scoring.score(source, response, item.gold, item.extra_info)
    except CallTimedOut:
        return Score(0.0, "timeout")
    except (CallFailed, StartFailed):
        return Score(0.0, "error")


def conclude(judged: Sequence[Judged], is_alike: bool, config: ChainConfig) -> Finding:
    """Say whether the answers show signal, else why they show none, with two of them.

    `is_alike`: training's prompts ask for answers in the same form.
    """
    is_custom = config.custom_reward.path is not None
    by_scorer: Counter[str] = Counter(one.score.verdict for one in judged)
    by_grader: Counter[str] = Counter(one.row.verdict for one in judged)
    summary = (
        f"{len(judged)} stored answers: for the training's scorer {_counted(by_scorer)}; for the "
        f"grader {_counted(by_grader)}"
    )
    by_acc = config.sampler.dynamic and config.sampler.metric == "acc"
    values = Counter(
        one.score.acc if by_acc else one.score.value for one in judged if one.is_scored
    )
    ((value, num_equal),) = values.most_common(1) or [(0.0, 0)]
    if num_equal < EQUAL_SHARE * values.total():
        return Finding("signal", OK, summary)
    cause = _cause(by_scorer, by_grader, is_custom)
    is_certain = NUM_CERTAIN <= len(judged) == num_equal
    is_certain = is_certain and _is_proof(cause, judged, is_alike, config)
    first = sorted(judged, key=lambda one: not one.row.is_right)[:NUM_SHOWN]
    advice = f"{ADVICE[cause]}. " + (f"{TRAIN_ANYWAY}. " if is_certain else "")
    advice += "Such as" + "".join(f"\n  {_shown(one)}" for one in first)
    why = (
        f"the scorer gives {num_equal} of them {value:g}, and equal rewards teach nothing"
        if values
        else "the scorer fails on all of them"
    )
    return Finding("signal", FAIL if is_certain else WARN, summary, advice, why=why)


def _cause(by_scorer: Mapping[str, int], by_grader: Mapping[str, int], is_custom: bool) -> str:
    """The likely cause of equal values, as in ADVICE."""
    num_judged = sum(by_scorer.values())
    num_more = by_grader["right"] - by_scorer["right"]
    # a user's function does not say whether it read an answer
    is_read = is_custom or by_scorer["no_answer"] < EQUAL_SHARE * num_judged
    if by_scorer["error"] + by_scorer["timeout"] == num_judged:
        return "failed"
    if by_scorer["right"] >= EQUAL_SHARE * num_judged:
        return "differ" if -num_more >= NUM_DIFFERENT else "easy"
    if num_more >= NUM_DIFFERENT or (not is_read and _is_read(by_grader)):
        return "differ"
    if by_grader["truncated"] > num_judged / 2:
        return "cut"
    return "hard" if is_read and _is_read(by_grader) else "unread"


def _is_read(by_grader: Mapping[str, int]) -> bool:
    num_read = by_grader["right"] + by_grader["wrong"]
    return num_read > (1 - EQUAL_SHARE) * sum(by_grader.values())


def _is_proof(cause: str, judged: Sequence[Judged], is_alike: bool, config: ChainConfig) -> bool:
    """True if the training's own prompts and limits would not change the outcome."""
    if cause == "differ":
        return is_alike
    longest = config.evaluate.max_response_tokens or config.serve.max_model_len
    is_as_long = longest is not None and config.rollout.max_response_tokens <= longest
    is_read = _is_read(Counter[str](one.row.verdict for one in judged))
    return cause == "unread" or (cause == "cut" and is_as_long and not is_read)


def _counted(verdicts: Mapping[str, int]) -> str:
    return ", ".join(
        f"{count} {verdict.replace('_', ' ')}" for verdict, count in sorted(verdicts.items())
    )


def _shown(one: Judged) -> str:
    row, score = one.row, one.score
    return (
        f"{shortened(row.problem)!r} -> {shortened(row.text or '')!r}: scorer "
        f"{score.verdict.replace('_', ' ')}, grader {row.verdict.replace('_', ' ')}, gold "
        f"{shortened(row.gold)!r}"
    )
