"""Checks of a recipe's problems: columns, lengths, gold answers, contamination, answer forms."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from dapo_core.draw.encoding import NO_ARGUMENTS, PromptEncoder
from dapo_core.draw.tokenizing import require_template_reads
from dapo_core.errors import DataError
from dapo_core.reward.routing import require_scorers
from dapo_core.reward.scorers import SCORERS
from eval.answers.grading import GRADERS
from eval.answers.pool import CallFailed, StartFailed
from eval.problems.items import Problem
from tasks.config import ChainConfig
from tasks.config.evaluate import EvaluateConfig
from tasks.config.lengths import Bounds, Lengths, bounds_of, explain
from tasks.data.benchmarks import benchmark_of
from tasks.data.contamination import find_hits, rows_to_drop
from tasks.evaluation.settings import grader_for
from tasks.preflight.finding import FAIL, OK, WARN, Findings
from tasks.preflight.scoring import Scoring

if TYPE_CHECKING:
    from eval.problems.items import EvaluationSet, Item
    from tasks.data.sources import Source
    from tasks.preflight.inputs import Inputs
    from tasks.preflight.model import ModelFacts

NUM_MEASURED = 256  # prompts of a set that are tokenized: those with the longest texts
NUM_SCORED = 3  # gold answers per data source that the scorer is tried on
BENCHMARK_ADVICE = (
    "a model trained on a benchmark cannot be compared with published results on it: train on "
    "another set (dapo datasets)"
)
SHOWN_CHARACTERS = 160  # of a prompt's end, where it says how to answer
# Answer formats that prompts ask for, and the response that gives one.
FORMS = {"\\boxed{}": "\\boxed{%s}", "Answer:": "Answer: %s", "####": "#### %s"}
_ASKED = {
    "\\boxed{}": re.compile(r"\\+boxed"),
    "Answer:": re.compile(r"Answer: ?\S"),
    "####": re.compile("####"),
}
_SOLUTIONS = ("solution", "reference_solution", "reasoning", "answer")  # of extra_info


def check_lengths(
    config: ChainConfig, facts: ModelFacts, inputs: Inputs, findings: Findings
) -> None:
    """Check the longest prompts of all sets against the model's positions and the length keys."""
    bounds, lengths = replace(bounds_of(config), positions=facts.positions), config.lengths
    measured: list[str] = []
    with findings.catching("prompt lengths"):
        if facts.tokenizer is not None:
            bounds, lengths = _longest(config, facts, inputs, bounds, measured)
    conflicts, advice = explain(lengths, bounds)
    if conflicts:
        findings.add("lengths", FAIL, "; ".join(conflicts), advice)
    elif measured:
        limit = f", the model has {facts.positions} positions" if facts.positions else ""
        findings.add("lengths", OK, " and ".join(measured) + limit)


def _longest(
    config: ChainConfig, facts: ModelFacts, inputs: Inputs, bounds: Bounds, measured: list[str]
) -> tuple[Bounds, Lengths]:
    """Return the bounds with the longest prompts, and the lengths of the longest benchmark."""
    rendering, arguments = config.rollout.chat_template_kwargs, config.evaluate.chat_template_kwargs
    lengths, data, tokenizer = config.lengths, config.data, facts.tokenizer
    assert tokenizer is not None
    require_template_reads(tokenizer, rendering)
    require_template_reads(tokenizer, arguments, "evaluate.chat_template_kwargs")
    if inputs.problems:
        text, pictured = longest_problems(facts, inputs, rendering)
        longest, most = max(text, pictured), data.max_prompt_tokens
        measured.append(f"training prompts have up to {longest} tokens")
        is_cut = data.too_long == "drop" or (data.too_long == "truncate_left" and pictured <= most)
        if is_cut and longest > most:  # a picture cannot be truncated
            measured[-1] += f" (above {most}, data.too_long={data.too_long})"
            longest = most
        bounds = replace(bounds, longest_prompt=longest)
    if inputs.evaluation is not None and config.validation.every:
        longest = longest_item(facts, inputs, inputs.evaluation, rendering)
        bounds = replace(bounds, longest_prompt=max(longest, bounds.longest_prompt or 0))
    questions = [
        (longest_item(facts, inputs, each, arguments), benchmark)
        for benchmark, each in inputs.evaluated(config)
    ]
    if questions:
        measured.append(f"evaluation prompts up to {max(longest for longest, _ in questions)}")
        pairs = [(longest, config.lengths_of(benchmark)) for longest, benchmark in questions]
        longest, lengths = max(pairs, key=lambda pair: pair[0] + pair[1].answer)
        bounds = replace(bounds, longest_question=longest)
    return bounds, lengths


def longest_problems(
    facts: ModelFacts, inputs: Inputs, arguments: Mapping[str, Any] = NO_ARGUMENTS
) -> tuple[int, int]:
    """Return the tokens of the longest training prompts without and with pictures."""
    texts = [each.messages for each in inputs.problems if not each.images]
    pictured = _longest_pictured(facts, inputs, inputs.pictured, arguments)
    return longest_prompt(facts, texts, arguments), pictured


def longest_item(
    facts: ModelFacts,
    inputs: Inputs,
    evaluation: EvaluationSet,
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> int:
    """Return the tokens of a set's longest prompt, with those of its pictures."""
    texts = [item.prompt for item in evaluation.items if not item.images]
    pictured = [
        Problem(
            item.id,
            "",
            item.gold,
            messages=item.prompt,
            images=tuple(map(Path.absolute, item.images)),
        )
        for item in evaluation.items
        if item.images and not isinstance(item.prompt, str)
    ]
    return max(
        longest_prompt(facts, texts, arguments),
        _longest_pictured(facts, inputs, pictured, arguments),
    )


def _longest_pictured(
    facts: ModelFacts, inputs: Inputs, problems: Sequence[Problem], arguments: Mapping[str, Any]
) -> int:
    """Return the tokens of the longest of these prompts with pictures, as training counts them."""
    if not problems:
        return 0
    assert inputs.model is not None
    assert facts.tokenizer is not None
    encoder = PromptEncoder(facts.tokenizer, inputs.model, inputs.folder, arguments)
    return int(encoder.encode(problems, encoder.render(problems)).lengths.max())


def check_answers(config: ChainConfig, problems: Sequence[Problem], findings: Findings) -> None:
    """Check that each source's scorer accepts its gold answers in the form that is asked for."""
    sources: dict[str, list[Problem]] = {str(one.data_source): [] for one in problems}
    for problem in problems:
        if len(chosen := sources[str(problem.data_source)]) < NUM_SCORED:
            chosen.append(problem)
    with findings.catching("scorer"):
        require_scorers(sources, config.reward, config.custom_reward)
        with closing(Scoring(config)) as scoring:
            for source, chosen in sources.items():
                _check_source(source, chosen, scoring, findings)


def check_columns(sources: Sequence[Source], findings: Findings) -> None:
    """Say what the columns of each local file are taken for, and warn of parts that are unused."""
    said: dict[str, None] = {}
    for source in sources:
        with findings.catching("data"):
            known = source.check_columns().known
            reading = f"{source.name}: {known.reading}"
            if not known.reading or reading in said:
                continue
            said[reading] = None
            if not known.doubt:
                findings.add("columns", OK, reading)
                continue
            advice = (
                "name the missing columns in data.columns.problem, .options or .system, or write "
                "{NAME} in data.prompt_template"
            )
            findings.add("columns", WARN, f"{reading}; {known.doubt}", advice)


def check_golds(inputs: Inputs, findings: Findings) -> None:
    """Warn of gold answers with several lines, which no short answer equals."""
    evaluated = inputs.evaluation.items if inputs.evaluation is not None else ()
    for key, found in (("data.train", inputs.problems), ("data.eval", evaluated)):
        several = [one for one in found if "\n" in one.gold.strip()]
        if several:
            findings.add(
                "answers",
                WARN,
                f"{len(several)} of {len(found)} gold answers of {key} have several lines, such as "
                f"{several[0].id}: {several[0].gold[:SHOWN_CHARACTERS]!r}",
                "answers are compared with the whole of it: name the column of the final answer in "
                "data.columns.answer, or end each solution in \\boxed{} or ####",
            )


def check_overlap(config: ChainConfig, inputs: Inputs, findings: Findings) -> None:
    """Check for training problems that are evaluated, and for training on a benchmark."""
    by_set: dict[str, list[Problem]] = {}
    for problem in inputs.problems:
        by_set.setdefault(problem.dataset, []).append(problem)
    for name, problems in by_set.items():
        texts = list(dict.fromkeys(problem.text for problem in problems))
        if inputs.held_out:
            with findings.catching("contamination"):
                hits = find_hits(name, partial(iter, texts), inputs.held_out)
                _, warning = rows_to_drop(hits, len(texts), config.data.contamination)
                if warning:
                    findings.add("contamination", WARN, warning, "use other problems in data.eval")
        if (benchmark := benchmark_of(name, texts)) is not None:
            found = f"data.train has problems of the benchmark {benchmark}, in {name}"
            findings.add("benchmark", WARN, found, BENCHMARK_ADVICE)


def check_forms(problems: Sequence[Problem], evaluation: EvaluationSet, findings: Findings) -> None:
    """Warn if the prompts of training and evaluation ask for different answer formats."""
    if not problems:
        return
    texts = {
        "training asks for": text_of(problems[0].messages or problems[0].text),
        "evaluation for": text_of(evaluation.items[0].prompt),
    }
    asked = {label: asked_forms(text) for label, text in texts.items()}
    shown = "; ".join(
        f"{label} {', '.join(asked[label]) or 'no answer format'}: ...{text[-SHOWN_CHARACTERS:]!r}"
        for label, text in texts.items()
    )
    if len(set(map(frozenset, asked.values()))) == 1:
        findings.add("prompts", OK, shown)
        return
    advice = (
        "the evaluation would measure something else than training teaches: make both ask for the "
        "same format (evaluate.prompt=given sends the file's own prompts, evaluate.prompt=FILE "
        "uses your template)"
    )
    findings.add("prompts", WARN, shown, advice)


def check_grader(evaluation: EvaluationSet, settings: EvaluateConfig, findings: Findings) -> None:
    """Check that the grader accepts the set's boxed gold answers, except by log-likelihood."""
    own = grader_for(settings)
    with own or GRADERS[evaluation.grader]() as grader:
        for item in () if evaluation.is_loglikelihood else evaluation.items[:NUM_SCORED]:
            graded = grader.grade_item(FORMS["\\boxed{}"] % item.gold, "stop", item, True)
            if graded.verdict != "right":
                failed = (graded.details or {}).get("error", "").strip().splitlines()
                findings.add(
                    "grader",
                    WARN if own is not None and not failed else FAIL,
                    f"the grader {settings.scorer or evaluation.grader} returns "
                    f"{failed[-1] if failed else graded.verdict} for the gold answer {item.gold!r} "
                    f"of {item.id}",
                    "name the set's type, such as data.eval={set: choice, path: FILE} for multiple "
                    "choice, or "
                    "correct the file or evaluate.scorer",
                )
                return


def asked_forms(text: str) -> list[str]:
    """Return the formats in `FORMS` that a prompt asks for."""
    return [form for form, pattern in _ASKED.items() if pattern.search(text)]


def longest_prompt(
    facts: ModelFacts, prompts: Sequence[Any], arguments: Mapping[str, Any] | None = None
) -> int:
    """Return the tokens of the longest prompt, among those with the longest texts."""
    longest = sorted(prompts, key=lambda prompt: len(text_of(prompt)), reverse=True)[:NUM_MEASURED]
    return max(prompt_tokens(facts, longest, arguments), default=0)


def prompt_tokens(
    facts: ModelFacts, prompts: Sequence[Any], arguments: Mapping[str, Any] | None = None
) -> list[int]:
    """Count the tokens of each prompt; `arguments` are the chat template's.

    Raises DataError if the template rejects a prompt or the model has no embedding for a token.
    """
    tokenizer = facts.tokenizer
    assert tokenizer is not None
    given = {**(arguments or {}), "add_generation_prompt": True, "tokenize": False}

    def rendered(prompt: Any) -> str:
        if isinstance(prompt, str):
            return prompt
        return str(tokenizer.apply_chat_template([dict(message) for message in prompt], **given))

    try:
        texts = [rendered(prompt) for prompt in prompts]
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(
            f"the model's chat template rejects a prompt: {error}; change the prompt's messages, "
            "or the template "
            "in the model's folder"
        ) from None
    token_ids = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids if texts else []
    largest = max((max(ids, default=0) for ids in token_ids), default=0)
    if facts.vocabulary is not None and largest >= facts.vocabulary:
        raise DataError(
            f"the tokenizer produces token {largest}, but the model's embedding has "
            f"{facts.vocabulary} rows "
            "(config.json, vocab_size): set model.path to a folder whose tokenizer belongs to its "
            "model"
        )
    return list(map(len, token_ids))


def text_of(prompt: Any) -> str:
    """The text of a prompt, with all messages of a chat."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message["content"] for message in prompt)


def _check_source(
    source: str, problems: Sequence[Problem], scoring: Scoring, findings: Findings
) -> None:
    scorer = scoring.name(source)
    right: dict[str, int] = {}
    try:
        for problem in problems:
            for form, response in gold_responses(problem):
                score = scoring.score(source, response, problem.gold, problem.extra_info)
                right[form] = right.get(form, 0) + (score.verdict == "right")
    except (CallFailed, StartFailed) as error:
        detail = (getattr(error, "failure", None) or str(error)).strip().splitlines()
        fault = f"{scorer} fails on a gold answer of data_source {source}: {detail[-1]}"
        findings.add("scorer", FAIL, fault, "correct the file of custom_reward.path")
        return
    read = [form for form, count in right.items() if count == len(problems)]
    asked = asked_forms(text_of(problems[0].messages or problems[0].text))
    gold = f"{len(problems)} gold answers of data_source {source} (such as {problems[0].gold!r})"
    if not any(right.values()):
        status = WARN if scoring.is_custom else FAIL  # custom ones may return points, not verdicts
        findings.add(
            "scorer",
            status,
            f"{scorer} rejects all {gold} in every form ({', '.join(right)})",
            f"correct reward_model.ground_truth, add {source}=SCORER to reward.scorers (scorers "
            "are "
            f"{', '.join(sorted(SCORERS))}), or set custom_reward.path",
        )
    elif asked and not scoring.is_custom and not any(form in read for form in asked):
        findings.add(
            "scorer",
            WARN,
            f"prompts of {source} ask for {', '.join(asked)}, but {scorer} reads {', '.join(read)}",
            f"no response would be right: add {source}=SCORER to reward.scorers (exact reads all "
            "of them) or change the prompts",
        )
    else:
        findings.add("scorer", OK, f"{scorer} accepts {gold} as {', '.join(read)}")


def gold_responses(problem: Problem | Item) -> Iterator[tuple[str, str]]:
    """Yield the gold answer in each form, then the set's reference solution, if any."""
    for form, pattern in FORMS.items():
        yield form, pattern % problem.gold
    for name in _SOLUTIONS:
        text = problem.extra_info.get(name)
        if isinstance(text, str) and len(text) > len(problem.gold):
            yield f"the set's {name}", text
            return
