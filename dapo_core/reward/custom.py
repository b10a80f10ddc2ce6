"""A scorer in a file of the user's own, and what a scoring process runs."""

from __future__ import annotations

import ast
import asyncio
import importlib.machinery
import importlib.util
import inspect
import math
import symtable
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dapo_core.errors import ConfigError
from dapo_core.reward.scorers import SCORERS, Score

MAX_ANSWER_CHARACTERS = 300
PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")


def require_function(
    path: Path, name: str, keys: tuple[str, str] = ("custom_reward.path", "custom_reward.name")
) -> None:
    """Raise ConfigError unless the file defines (or imports) the function at its top level. Runs nothing of it.

    `keys` are those that name the file and the function.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree, symbols = ast.parse(text, str(path)), symtable.symtable(text, str(path), "exec").get_symbols()
    except OSError as error:
        raise ConfigError(
            f"{keys[0]}={path} cannot be read: {error.strerror}; set it to a Python file that has "
            f"{name}({', '.join(PARAMETERS)})"
        ) from None
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{keys[0]}={path} is not Python: {error}; correct the file") from None
    names = sorted(one.get_name() for one in symbols if one.is_assigned() or one.is_imported())
    if name not in names:
        raise ConfigError(
            f"{keys[1]}={name} is not a top-level name of {path}, which has "
            f"{', '.join(names) or 'none'}; set {keys[1]} to the function that scores"
        )
    for function in tree.body:
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name == name:
            _require_parameters(path, function)


def _require_parameters(path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """Raise ConfigError unless the function can be called with PARAMETERS by name."""
    given = function.args
    named = [argument.arg for argument in (*given.args, *given.kwonlyargs)]
    num_required = len(given.args) - len(given.defaults)
    required = {argument.arg for argument in (*given.posonlyargs, *given.args[:num_required])}
    required |= {
        argument.arg
        for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        if default is None
    }
    refused = [] if given.kwarg else [parameter for parameter in PARAMETERS if parameter not in named]
    unknown = sorted(required - set(PARAMETERS))
    if refused or unknown:
        raise ConfigError(
            f"{function.name}({ast.unparse(given)}) of {path} cannot be called as "
            f"{function.name}({', '.join(f'{parameter}=...' for parameter in PARAMETERS)}); rename its parameters"
        )


def load_scorer(path: str | None = None, name: str = "") -> Callable[..., tuple[Any, ...]]:
    """The function of a scoring process: the name of a scorer (None: the user's function) and PARAMETERS in.

    It returns the fields of a Score, or raises what the scorer raises.
    """
    function = None if path is None else load_function(path, name)
    runner = asyncio.Runner()

    def score(scorer: str | None, *arguments: Any) -> tuple[Any, ...]:
        if scorer is not None:
            result = SCORERS[scorer](arguments[1], arguments[2])
        else:
            assert function is not None
            result = call_function(function, runner, arguments)
        answer = None if result.answer is None else result.answer[:MAX_ANSWER_CHARACTERS]
        return result.value, result.verdict, answer, result.acc

    return score


def load_function(path: str, name: str) -> Callable[..., Any]:
    """The function of the file, which is imported as a separate module; passes its exceptions on.

    It is compiled each time: to Python's cache, a file of the same size changed within a second is the old one.
    """
    spec = importlib.util.spec_from_file_location("custom_reward", path)
    if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        raise ConfigError(f"custom_reward.path={path} is not a Python file (*.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # where dataclasses of the file look up their annotations
    exec(spec.loader.source_to_code(Path(path).read_bytes(), path), module.__dict__)
    function: Callable[..., Any] = getattr(module, name)
    return function


def call_function(function: Callable[..., Any], runner: asyncio.Runner, arguments: tuple[Any, ...]) -> Score:
    """What the function says of one response, as a Score; a coroutine is run to its end. Raises what it raises."""
    result = function(**dict(zip(PARAMETERS, arguments, strict=True)))
    if inspect.isawaitable(result):
        result = runner.run(_awaited(result))
    return to_score(result)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def to_score(result: Any) -> Score:
    """The Score of a number, or of a mapping with `score` and optionally `acc` and `pred` (the answer).

    As in verl, the score stands for `acc` where there is none. The verdict is right iff acc >= 1. Raises
    TypeError for what is not a number, ValueError for NaN and infinities, KeyError for a mapping without score.
    """
    fields: Mapping[str, Any] = result if isinstance(result, Mapping) else {"score": result}
    value = _number("score", fields["score"])
    acc = _number("acc", fields["acc"]) if fields.get("acc") is not None else value
    answer = fields.get("pred")
    return Score(value, "right" if acc >= 1 else "wrong", None if answer is None else str(answer), acc)


def _number(name: str, value: Any) -> float:
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}: {value!r:.200}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, not {number}")
    return number
