"""Checks of a recipe's problems: lengths under the tokenizer, the scorer on gold answers, and answer formats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from dapo_core.errors import DataError
from dapo_core.reward.routing import require_scorers, routes, scorer_name
from dapo_core.reward.scorers import SCORERS, VERL_SCORERS, Scorer
from dapo_core.tokenizing import require_template_reads
from eval.answers.grading import GRADERS
from eval.answers.pool import CallFailed, Pool, StartFailed
from tasks.config import ChainConfig
from tasks.config.evaluate import EvaluateConfig
from tasks.config.lengths import bounds_of, explain
from tasks.evaluation.settings import grader_for
from tasks.preflight.finding import FAIL, OK, WARN, Findings

if TYPE_CHECKING:
    from eval.problems.items import EvaluationSet, Problem
    from tasks.preflight.inputs import Inputs
    from tasks.preflight.model import ModelFacts

NUM_MEASURED = 256  # prompts of a set whose tokens are counted: those with the longest texts
NUM_SCORED = 3  # problems of a data source whose gold answer the scorer reads
SHOWN_CHARACTERS = 160  # of a prompt's end, where it says how to answer
# How a prompt asks for its answer, and how a response gives it.
FORMS = {"\\boxed{}": "\\boxed{%s}", "Answer:": "Answer: %s", "####": "#### %s"}
_ASKED = {"\\boxed{}": re.compile(r"\\+boxed"), "Answer:": re.compile(r"Answer: ?\S"), "####": re.compile("####")}
_SOLUTIONS = ("solution", "reference_solution", "reasoning", "answer")  # of extra_info


def check_lengths(config: ChainConfig, facts: ModelFacts, inputs: Inputs, findings: Findings) -> None:
    """The longest prompts of all sets, the model's positions and the keys: all conflicts, with keys that fit."""
    bounds, lengths = replace(bounds_of(config), positions=facts.positions), config.lengths
    rendering, said = config.rollout.chat_template_kwargs, []
    with findings.catching("prompt lengths"):
        if facts.tokenizer is not None:
            require_template_reads(facts.tokenizer, rendering)
            arguments = config.evaluate.chat_template_kwargs
            require_template_reads(facts.tokenizer, arguments, "evaluate.chat_template_kwargs")
        if facts.tokenizer is not None and inputs.problems:
            chats: list[Any] = [problem.messages for problem in inputs.problems]
            longest = longest_prompt(facts, chats, rendering)
            said.append(f"training prompts have up to {longest} tokens")
            if config.data.too_long != "error" and longest > config.data.max_prompt_tokens:
                said[-1] += f" (above {config.data.max_prompt_tokens}, data.too_long={config.data.too_long})"
                longest = config.data.max_prompt_tokens
            bounds = replace(bounds, longest_prompt=longest)
        if facts.tokenizer is not None and inputs.evaluation is not None and config.validation.every:
            validated = longest_prompt(facts, [item.prompt for item in inputs.evaluation.items], rendering)
            bounds = replace(bounds, longest_prompt=max(validated, bounds.longest_prompt or 0))
        if facts.tokenizer is not None and (asked := inputs.asked(config)):
            questions = [longest_prompt(facts, [item.prompt for item in one.items], arguments) for _, one in asked]
            of_each = zip(questions, (config.lengths_of(one) for one, _ in asked), strict=True)
            longest, lengths = max(of_each, key=lambda pair: pair[0] + pair[1].answer)  # with the answer
            bounds = replace(bounds, longest_question=longest)
            said.append(f"evaluation prompts up to {max(questions)}")
    found, advice = explain(lengths, bounds)
    if found:
        findings.add("lengths", FAIL, "; ".join(found), advice)
    elif said:
        limit = f", the model has {facts.positions} positions" if facts.positions else ""
        findings.add("lengths", OK, " and ".join(said) + limit)


def check_answers(config: ChainConfig, problems: Sequence[Problem], findings: Findings) -> None:
    """The scorer of each data source on gold answers of its own, in the form its prompt asks for."""
    sources = {str(problem.data_source): [] for problem in problems}  # type: dict[str, list[Problem]]
    for problem in problems:
        if len(own := sources[str(problem.data_source)]) < NUM_SCORED:
            own.append(problem)
    with findings.catching("scorer"):
        require_scorers(sources, config.reward, config.custom_reward)
        with _Scoring(config) as scoring:
            for source, own in sources.items():
                _check_source(source, own, scoring, findings)


def check_forms(problems: Sequence[Problem], evaluation: EvaluationSet, findings: Findings) -> None:
    """The prompts of training and evaluation side by side; a warning where they ask for different forms."""
    if not problems:
        return
    texts = [_text_of(problems[0].messages or problems[0].text), _text_of(evaluation.items[0].prompt)]
    asked = [asked_forms(text) for text in texts]
    shown = "; ".join(
        f"{which} {', '.join(forms) or 'no form of answer'}: ...{text[-SHOWN_CHARACTERS:]!r}"
        for which, forms, text in zip(("training asks for", "evaluation for"), asked, texts, strict=True)
    )
    if set(asked[0]) == set(asked[1]):
        findings.add("prompts", OK, shown)
        return
    findings.add(
        "prompts", WARN, shown,
        "what is trained is then not what is measured: make both ask alike (evaluate.prompt=given sends the "
        "file's own, evaluate.prompt=FILE a template of yours)",
    )  # fmt: skip


def check_grader(evaluation: EvaluationSet, settings: EvaluateConfig, findings: Findings) -> None:
    """The evaluation's grader on gold answers of the set's own, in a box. Options that are weighed need none."""
    own = grader_for(settings)
    with own or GRADERS[evaluation.grader]() as grader:
        for item in () if evaluation.is_loglikelihood else evaluation.items[:NUM_SCORED]:
            graded = grader.grade_item(FORMS["\\boxed{}"] % item.gold, "stop", item, True)
            if graded.verdict != "right":
                failed = (graded.details or {}).get("error", "").strip().splitlines()
                findings.add(
                    "grader", WARN if own is not None and not failed else FAIL,
                    f"the grader {settings.scorer or evaluation.grader} calls the gold answer {item.gold!r} of "
                    f"{item.id} {failed[-1] if failed else graded.verdict}",
                    "name the set that it is, such as data.eval={set: choice, path: FILE} for options, or correct "
                    "the file or evaluate.scorer",
                )  # fmt: skip
                return


def asked_forms(text: str) -> list[str]:
    """The forms of `FORMS` that a prompt's text asks for."""
    return [form for form, pattern in _ASKED.items() if pattern.search(text)]


def longest_prompt(facts: ModelFacts, prompts: Sequence[Any], arguments: Mapping[str, Any] | None = None) -> int:
    """Tokens of the longest prompt, looked for among the longest texts; the rest is as in `prompt_tokens`."""
    longest = sorted(prompts, key=lambda prompt: len(_text_of(prompt)), reverse=True)[:NUM_MEASURED]
    return max(prompt_tokens(facts, longest, arguments), default=0)


def prompt_tokens(
    facts: ModelFacts, prompts: Sequence[Any], arguments: Mapping[str, Any] | None = None
) -> list[int]:
    """Tokens of each prompt; a text is sent without a template, of which `arguments` are.

    Raises DataError where the template refuses a prompt or gives a token that the model has no embedding for.
    """
    tokenizer = facts.tokenizer
    assert tokenizer is not None
    try:
        texts = [
            prompt
            if isinstance(prompt, str)
            else str(
                tokenizer.apply_chat_template(
                    [dict(message) for message in prompt],
                    **{**(arguments or {}), "add_generation_prompt": True, "tokenize": False},
                )
            )
            for prompt in prompts
        ]
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(
            f"the model's chat template refuses a prompt: {error}; change the prompt's messages, or the template "
            "in the model's folder"
        ) from None
    token_ids = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids if texts else []
    largest = max((max(ids, default=0) for ids in token_ids), default=0)
    if facts.vocabulary is not None and largest >= facts.vocabulary:
        raise DataError(
            f"the tokenizer gives token {largest}, and the model's embedding has {facts.vocabulary} rows "
            "(config.json, vocab_size): set model.path to a folder whose files belong together"
        )
    return list(map(len, token_ids))


def _text_of(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


class _Scoring:
    """The recipe's scorers; those that may hang, and the user's own, in a process that can be killed."""

    def __init__(self, config: ChainConfig) -> None:
        custom, self.reward = config.custom_reward, config.reward
        self.is_custom = custom.path is not None
        self._table = routes(config.reward.scorers)
        self._scorers = VERL_SCORERS if config.algorithm.compat == "verl" else SCORERS
        arguments = (str(custom.path), custom.name) if self.is_custom else ()
        self._pool = Pool(
            "dapo_core.reward.custom:load_scorer", arguments, timeout_seconds=config.reward.timeout_seconds
        )

    def __enter__(self) -> _Scoring:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def name(self, source: str) -> str:
        """What messages call the source's scorer."""
        return "custom_reward.path" if self.is_custom else scorer_name(source, self._table)

    def is_right(self, problem: Problem, response: str) -> bool:
        """Whether the response is right. Raises CallFailed and StartFailed for a scorer that fails."""
        source = str(problem.data_source)
        name = None if self.is_custom else scorer_name(source, self._table)
        scorer: Scorer | None = None if name is None else self._scorers[name]
        if scorer is not None and scorer.window_characters is not None:
            return scorer(response[-scorer.window_characters :], problem.gold).verdict == "right"
        call = (name, source, response, problem.gold, dict(problem.extra_info))
        return bool(self._pool.submit(*call).result()[1] == "right")


def _check_source(source: str, problems: Sequence[Problem], scoring: _Scoring, findings: Findings) -> None:
    scorer = scoring.name(source)
    right: dict[str, int] = {}
    try:
        for problem in problems:
            for form, response in _gold_responses(problem):
                right[form] = right.get(form, 0) + scoring.is_right(problem, response)
    except (CallFailed, StartFailed) as error:
        detail = (getattr(error, "failure", None) or str(error)).strip().splitlines()
        findings.add(
            "scorer", FAIL, f"{scorer} fails on a gold answer of data_source {source}: {detail[-1]}",
            "correct the file of custom_reward.path",
        )  # fmt: skip
        return
    read = [form for form, count in right.items() if count == len(problems)]
    asked = asked_forms(_text_of(problems[0].messages or problems[0].text))
    gold = f"{len(problems)} gold answers of data_source {source}, such as {problems[0].gold!r}"
    if not any(right.values()):
        status = WARN if scoring.is_custom else FAIL  # a file of the user's may give points, not verdicts
        findings.add(
            "scorer", status, f"{scorer} calls all {gold}, wrong in every form ({', '.join(right)})",
            f"correct reward_model.ground_truth, add {source}=SCORER to reward.scorers (scorers are "
            f"{', '.join(sorted(SCORERS))}), or set custom_reward.path",
        )  # fmt: skip
    elif asked and not scoring.is_custom and not any(form in read for form in asked):
        findings.add(
            "scorer", WARN, f"prompts of {source} ask for {', '.join(asked)}; {scorer} reads {', '.join(read)}",
            f"no response would be right: add {source}=SCORER to reward.scorers (math_boxed reads boxes), or "
            "change the prompts",
        )  # fmt: skip
    else:
        findings.add("scorer", OK, f"{scorer} calls {gold}, right as {', '.join(read)}")


def _gold_responses(problem: Problem) -> Iterator[tuple[str, str]]:
    """The gold answer in each form, and the set's own reference solution where it has one."""
    for form, pattern in FORMS.items():
        yield form, pattern % problem.gold
    for name in _SOLUTIONS:
        text = problem.extra_info.get(name)
        if isinstance(text, str) and len(text) > len(problem.gold):
            yield f"the set's own {name}", text
            return
