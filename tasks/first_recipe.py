"""`dapo init`: a commented recipe for a model and a dataset, sized for this machine, the model and the prompts."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import yaml

from dapo_core.config.fields import known_fields
from dapo_core.device import accelerators
from dapo_core.errors import ConfigError
from dapo_core.reward.routing import routes
from eval.problems import ProblemsError
from eval.problems.files import iterate_problems, iterate_rows
from eval.problems.items import Problem
from eval.problems.problem_set import ProblemSet
from eval.problems.registry import OWN, SETS
from eval.problems.rows import chat_of
from tasks.config import ChainConfig
from tasks.data.reading import SetCount, iterate_source, to_row
from tasks.data.sources import train_sources
from tasks.lengths import Bounds, Lengths, fitted
from tasks.preflight.finding import FAIL, Findings
from tasks.preflight.inputs import inputs_here
from tasks.preflight.model import ModelFacts, check_model
from tasks.preflight.prompts import longest_prompt

logger = logging.getLogger(__name__)

NO_COLUMNS: Mapping[str, str] = {}
NUM_TRIED = 50  # rows by which a file's form is recognised
HELD_OUT_PART, LEAST_HELD_OUT, MOST_HELD_OUT = 10, 8, 500  # of a file without a held-out set: every tenth row
MAX_SPLIT_BYTES = 64 * 1024**2
LEAST_RESPONSE = 2  # tokens that a training needs after its longest prompt
MOST_LEFT_OUT = 0.5  # of a file's rows; more are a sign of wrong columns or a wrong model
_REMOTE = re.compile(r"(hf|modelscope|https?):")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PROBLEMS = ("problem", "question", "query", "prompt", "instruction", "input", "messages", "conversation", "text")
_ANSWERS = ("answer", "final_answer", "gold", "ground_truth", "expected", "target", "label", "solution", "output")
GIB = 1024**3
CPU_RESPONSE_TOKENS, RESPONSE_TOKENS = 256, 8192
CPU_CACHE_SEQUENCES = 16  # longest sequences that an engine's cache has room for on a CPU


@dataclass(frozen=True)
class Machine:
    """The devices that a recipe may use."""

    kind: str
    num_devices: int
    num_cores: int

    @staticmethod
    def this() -> Machine:
        """NPUs if there are any, else CUDA devices, else the CPU."""
        cores = len(os.sched_getaffinity(0))
        for device in accelerators():
            if count := len(device.visible(os.environ)):
                return Machine(device.kind, count, cores)
        return Machine("cpu", 1, cores)


def first_recipe(
    path: Path,
    model: Mapping[str, Any],
    train: str,
    held_out: str | None,
    machine: Machine,
    columns: Mapping[str, str] = NO_COLUMNS,
) -> str:
    """The recipe's text; `model` is its section of that name.

    Files that no recipe can name as they are, are written beside it in another form.
    Raises ConfigError for what is neither a file nor a name, and for rows whose columns say nothing.
    """
    count = SetCount(train)
    if held_out is not None:
        data = {"train": data_set(train, "data", columns), "eval": data_set(held_out, "eval", columns)}
        known = data["eval"][0]["set"] if isinstance(data["eval"], list) else ""
        if known in SETS and SETS[known].num_items is not None and not _is_complete(Path(held_out), SETS[known]):
            target = path.with_name(f"{path.stem}.eval.jsonl")
            _write_rows(_solved_rows(Path(held_out), SETS[known]), target)
            data["eval"] = str(target)
    else:
        data, count = split(path, train, columns)
    tree: dict[str, Any] = {"data": data, "model": dict(model)}
    facts, bounds, unknown = _facts(tree)
    if held_out is None and facts.positions and (bounds.longest_prompt or 0) > facts.positions - LEAST_RESPONSE:
        limit = facts.positions // 2
        tree["data"], count = split(
            path, train, columns, limit, lambda prompt: longest_prompt(facts, [prompt]) <= limit
        )
        _, bounds, unknown = _facts(tree)
    for reason, number in count.refused.items():
        logger.warning(
            "%s: left out of the recipe's files: %d of %d rows, with %s; %s",
            train, number, count.read, reason, count.examples[reason][0],
        )  # fmt: skip
    lengths = sized_lengths(machine, bounds)
    tree["data"]["max_prompt_tokens"] = lengths.prompt
    tree |= sized(machine, facts, lengths)
    if unknown:
        tree["reward"]["scorers"] = [f"{source}={OWN.scorer}" for source in unknown]
    return render(tree, machine, facts, bounds)


def model_keys(model: str, chat_template: Path | None = None) -> dict[str, Any]:
    """The section `model` for a folder or a hub's id. Raises ConfigError for neither."""
    more = {} if chat_template is None else {"chat_template": str(chat_template)}
    if Path(model).exists():
        return {"source": "path", "path": model, **more}
    hub, _, rest = model.rpartition(":")
    name, _, revision = rest.partition("@")
    source = {"": "huggingface", "hf": "huggingface", "modelscope": "modelscope"}.get(hub)
    if source is None or not _HUB_ID.fullmatch(name):
        raise ConfigError(f"--model {model} is no folder here and no id of a hub, such as Qwen/Qwen3-8B")
    return {"source": source, "id": name, **({"revision": revision} if revision else {}), **more}


def data_set(name: str, option: str, columns: Mapping[str, str] = NO_COLUMNS) -> Any:
    """The value of data.train or data.eval: a registered name, a hub's id, or a file and how its rows are read."""
    if name in SETS or _REMOTE.match(name):
        return name
    path = Path(name)
    if not path.exists():
        if _HUB_ID.fullmatch(name):
            return f"hf:{name}"
        raise ConfigError(
            f"--{option} {name} is no file or folder here, no id of a hub and no registered set "
            f"({', '.join(SETS)})"
        )
    if not columns and _read_as(path, OWN):
        return name
    for known in SETS.values():
        if not columns and known.name != "choice" and _is_unmistakable(_read_as(path, known)):
            return [{"set": known.name, "path": name}]
    return [{"set": name, "columns": guessed_columns(path, columns)}]


def guessed_columns(path: Path, said: Mapping[str, str] = NO_COLUMNS) -> dict[str, str]:
    """Which columns of a file hold problem and answer: as `said`, else by their names.

    Raises ConfigError where none do.
    """
    rows = next(iterate_rows(path), [])
    names = list(rows[0]) if rows else []
    if unknown := [name for name in said.values() if name not in names]:
        raise ConfigError(f"{path} has no column {unknown[0]}, but {', '.join(names)}; correct --columns")
    by_word = {name.lower().strip(): name for name in names if name not in said.values()}
    problem = said.get("problem") or next((by_word[word] for word in _PROBLEMS if word in by_word), None)
    answers = (by_word[word] for word in _ANSWERS if word in by_word and by_word[word] != problem)
    answer = said.get("answer") or next(answers, None)
    if problem is None or answer is None:
        if len(names) == 1 and (signs := set(names[0]) & set(";\t|")):
            raise ConfigError(f"{path} is separated by {signs.pop()!r}; save it with commas")
        raise ConfigError(
            f"{path} has the columns {', '.join(names) or '(none)'}, none of which says by its name that it holds "
            f"the {'problem' if problem is None else 'answer'}; add --columns problem=NAME,answer=NAME"
        )
    asked = "messages" if chat_of(rows[0][problem]) is not None else "problem"
    return {**said, asked: problem, "answer": answer}


def columns_said(text: str | None) -> dict[str, str]:
    """`problem=NAME,answer=NAME` as a dictionary. Raises ConfigError for anything else."""
    pairs = [part.partition("=") for part in (text or "").split(",") if part]
    if not all(name in ("problem", "answer") and column for name, _, column in pairs):
        raise ConfigError(f"--columns {text} is not problem=NAME,answer=NAME")
    return {name: column for name, _, column in pairs}


def _read_as(path: Path, known: ProblemSet) -> list[tuple[Mapping[str, Any], Problem]]:
    """The first rows of a file in a set's form, with their problems; none if one of them is of another form."""
    try:
        tried = list(itertools.islice(iterate_problems(path, known.schemas), NUM_TRIED))
    except ProblemsError:
        return []
    found = [(row, problem) for _, row, problem in tried if isinstance(problem, Problem)]
    return found if len(found) == len(tried) else []


def _is_unmistakable(found: Sequence[tuple[Mapping[str, Any], Problem]]) -> bool:
    """Whether a set's form says more than columns do: an answer within a text, options to be written out."""
    return any(
        not {problem.text, problem.gold} <= {str(value) for value in row.values()} for row, problem in found
    )


def split(
    recipe: Path,
    train: str,
    columns: Mapping[str, str] = NO_COLUMNS,
    most_tokens: int | None = None,
    fits: Callable[[Any], bool] | None = None,
) -> tuple[dict[str, Any], SetCount]:
    """data.train and data.eval of one source: its own test split, or two files beside the recipe.

    The files lack the rows that cannot be used, and those whose prompt does not fit into `most_tokens`: the count
    has them. Raises ConfigError for a source that has to be fetched, or is too large or small to be split here,
    and DataError if more than half of its rows are left out.
    """
    if train in SETS and SETS[train].test:
        return {"train": train, "eval": train}, SetCount(train)
    value, path = data_set(train, "data", columns), Path(train)
    if not path.is_file() or path.stat().st_size > MAX_SPLIT_BYTES:
        raise ConfigError(f"--data {train} comes without a held-out set; name one with --eval")
    config = ChainConfig.model_validate({"data": {"train": value, "eval": value}, "model": {"source": "recipe"}})
    source, count = train_sources(config)[0], SetCount(train)
    one = value[0] if isinstance(value, list) else {"set": value}
    is_solved = one["set"] in SETS  # a part of a set must not bear its name: accuracy would not compare
    rows = list[dict[str, Any]]()
    for problem, row in iterate_source(config, source, count):
        if fits is not None and not fits(to_row(source, problem, row)["prompt"]):
            count.refuse(count.read - 1, f"a prompt of more than {most_tokens:,} tokens", row)
        elif is_solved:
            rows.append({"id": str(len(rows)), "problem": problem.text, "answer": problem.gold})
        else:
            rows.append(dict(row))
    count.require_usable(MOST_LEFT_OUT, "Correct the rows, or name other columns with --columns.")
    if len(rows) < 2 * LEAST_HELD_OUT:
        raise ConfigError(f"{train} has {len(rows)} rows, too few to hold some out; name others with --eval")
    every = len(rows) // min(max(len(rows) // HELD_OUT_PART, LEAST_HELD_OUT), MOST_HELD_OUT)
    one = {"set": train} if is_solved else one
    parts: dict[str, Any] = {}
    for name, is_held_out in (("train", False), ("eval", True)):
        target = recipe.with_name(f"{recipe.stem}.{name}.jsonl")
        _write_rows([row for number, row in enumerate(rows) if (number % every == 0) is is_held_out], target)
        parts[name] = [{**one, "set": str(target)}] if len(one) > 1 else str(target)
    return parts, count


def _is_complete(path: Path, known: ProblemSet) -> bool:
    texts = {
        problem.text for _, _, problem in iterate_problems(path, known.schemas) if isinstance(problem, Problem)
    }
    return len(texts) == known.num_items


def _solved_rows(path: Path, known: ProblemSet) -> list[dict[str, Any]]:
    """The usable rows of a file in a registered set's form, as {id, problem, answer}."""
    found = [problem for _, _, problem in iterate_problems(path, known.schemas) if isinstance(problem, Problem)]
    return [{"id": str(number), "problem": one.text, "answer": one.gold} for number, one in enumerate(found)]


def _write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    path.write_text("".join(lines), encoding="utf-8")


def _facts(tree: dict[str, Any]) -> tuple[ModelFacts, Bounds, list[str]]:
    """What the model and the prompts say, as far as they are here, and data sources without a scorer.

    Raises PreflightError for what is unusable.
    """
    config = ChainConfig.model_validate(tree)
    findings = Findings()
    inputs = inputs_here(config, findings)
    facts = check_model(inputs.model, config, findings) if inputs.model is not None else ModelFacts()
    findings[:] = [finding for finding in findings if finding.status == FAIL]
    findings.require()
    bounds = Bounds(positions=facts.positions)
    if facts.tokenizer is not None:
        prompts: list[Any] = [one.messages for one in inputs.problems]
        prompts += [item.prompt for item in inputs.evaluation.items] if inputs.evaluation else []
        longest = longest_prompt(facts, prompts) if prompts else None
        bounds = replace(bounds, longest_prompt=longest, longest_question=longest)
    return facts, bounds, sorted({one.data_source for one in inputs.problems if one.data_source} - routes().keys())


def sized_lengths(machine: Machine, bounds: Bounds) -> Lengths:
    """Lengths for the machine that fit the model and the prompts. Raises ConfigError where none do."""
    response = CPU_RESPONSE_TOKENS if machine.kind == "cpu" else RESPONSE_TOKENS
    known = bounds.longest_prompt
    prompt = 1024 if known is None else max(-(-known // 64) * 64, 64)
    wanted = Lengths(prompt, response, response // 5, response, prompt + response, 2 * (prompt + response))
    lengths = fitted(wanted, bounds)
    if lengths is None:
        raise ConfigError(
            f"the longest prompt has {known} tokens, which leaves a response no room in the model's "
            f"{bounds.positions} positions; take a model with more, or shorter prompts"
        )
    served = lengths.prompt + lengths.answer
    served = max(served, (bounds.longest_question or 0) + lengths.answer)
    return replace(lengths, served=served, micro_batch=max(2 * (lengths.prompt + lengths.response), 4096))


def sized(machine: Machine, facts: ModelFacts, lengths: Lengths) -> dict[str, Any]:
    """The sections whose keys depend on the machine."""
    is_cpu = machine.kind == "cpu"
    num_ranks = 1 if is_cpu else max(machine.num_devices // 2, 1)
    workers = 1 if is_cpu else max(machine.num_devices - num_ranks, 1)
    prompts, mini, steps = (8, 8, 10) if is_cpu else (64, 16, 100)
    rollout: dict[str, Any] = {"num_workers": workers, "group_size": 8 if is_cpu else 16}
    rollout["max_response_tokens"] = lengths.response
    serve: dict[str, Any] = {"max_model_len": lengths.served, "num_servers": 1 if is_cpu else machine.num_devices}
    train: dict[str, Any] = {
        "device": machine.kind,
        "num_ranks": num_ranks,
        "total_steps": steps,
        "train_prompts": prompts,
        "mini_prompts": mini,
        "micro_batch_tokens": lengths.micro_batch,
        "warmup_steps": max(steps * (prompts // mini) // 10, 1),
    }
    if not is_cpu and machine.num_devices == 1:
        train["placement"] = "colocated"
    if is_cpu:
        rollout |= {"threads_per_worker": machine.num_cores, "max_num_seqs": 64}
        rollout["memory_gigabytes"] = cache_gigabytes(facts, lengths.prompt + lengths.response, 4)
        serve |= {"memory_gigabytes": cache_gigabytes(facts, lengths.served, 4), "eager": True}
        train["threads_per_rank"] = machine.num_cores
    return {
        "rollout": rollout,
        "reward": {"overlong": {"buffer_tokens": lengths.buffer}},
        "sampler": {"gen_prompts": 3 * prompts},
        "train": train,
        "serve": serve,
        "evaluate": {"max_response_tokens": lengths.answer},
    }


def cache_gigabytes(facts: ModelFacts, tokens: int, item_bytes: int) -> float:
    """A cache for some of the longest sequences, at most an eighth of the memory, in steps of a tenth."""
    wanted = CPU_CACHE_SEQUENCES * tokens * (facts.token_bytes or 65_536) * item_bytes / 2 / GIB
    most = psutil.virtual_memory().total / 8 / GIB
    return max(math.ceil(10 * min(wanted, most)) / 10, 0.2)


def render(tree: dict[str, Any], machine: Machine, facts: ModelFacts, bounds: Bounds) -> str:
    """The tree as YAML, with a comment on each section."""
    is_cpu = machine.kind == "cpu"
    devices = f"{machine.num_cores} cores" if is_cpu else f"{machine.num_devices} {machine.kind} devices"
    model = f"a model of {facts.parameters:,} parameters" if facts.parameters else "a model that is fetched first"
    positions = f" and {facts.positions:,} positions" if facts.positions else ""
    longest = f"the longest prompt has {bounds.longest_prompt} tokens" if bounds.longest_prompt else "not measured"
    comments = {
        "data": f"Names (dapo datasets), files, folders, hf:ORG/NAME. Longest prompt allowed; {longest}.",
        "model": "A folder, or source: huggingface or modelscope with id and revision.",
        "rollout": "Responses to each prompt, their longest length, and the engines that sample them.",
        "reward": "The last tokens before the limit cost points. Scorers by data source, or custom_reward.path.",
        "sampler": "Prompts in flight at once; groups all right or all wrong are drawn again.",
        "train": "Steps first of all: a few, to see the chain work, then hundreds.",
        "serve": "vLLM servers of the evaluation before and after.",
        "evaluate": "Answers are greedy and as long as in training.",
    }
    lines = [f"# Written by dapo init for {devices}, {model}{positions}."]
    lines += ["# Every other key has its default: dapo config explain KEY. Next: dapo plan, then dapo run."]
    for section, keys in tree.items():
        chosen = {name: value for name, value in keys.items() if value != _default(section, name)}
        text = yaml.dump({section: chosen}, Dumper=_Plain, sort_keys=False, allow_unicode=True)
        lines += [f"# {comments[section]}", text.rstrip()] if chosen else []
    return "\n".join(lines) + "\n"


class _Plain(yaml.SafeDumper):
    """YAML without anchors: columns are written for each set."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _default(section: str, name: str) -> Any:
    field = known_fields(ChainConfig).get(f"{section}.{name}")
    return None if field is None else field.get_default(call_default_factory=True, validated_data={})
