"""User-defined functions from files, and the function that scoring processes run."""

from __future__ import annotations

import ast
import asyncio
import importlib.machinery
import importlib.util
import inspect
import json
import symtable
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.errors import ConfigError
from dapo_core.reward.scorers import SCORERS, Score

if TYPE_CHECKING:
    from dapo_core.config.training import CustomRewardConfig

MAX_ANSWER_CHARACTERS = 300
MAX_NUMBER = 1e30  # larger rewards have no advantages in float32
PARAMETERS = ("data_source", "solution_str", "ground_truth", "extra_info")
LOSS_PARAMETERS = ("log_probs", "old_log_probs", "advantages", "response_mask", "responses")
LOSS_KEYS = ("algorithm.custom_loss.path", "algorithm.custom_loss.name")


def require_function(
    path: Path,
    name: str,
    keys: tuple[str, str] = ("custom_reward.path", "custom_reward.name"),
    parameters: Sequence[str] = PARAMETERS,
) -> None:
    """Raise ConfigError unless the file, which is not run, defines or imports the function.

    `keys` are the configuration keys for the file and the function, `parameters` its arguments.
    """
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text, str(path))
        symbols = symtable.symtable(text, str(path), "exec").get_symbols()
    except OSError as error:
        raise ConfigError(
            f"{keys[0]}={path} cannot be read: {error.strerror}; set it to a Python file that "
            f"defines {name}({', '.join(parameters)})"
        ) from None
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{keys[0]}={path} is not valid Python: {error}; fix the file") from None
    names = sorted(each.get_name() for each in symbols if each.is_assigned() or each.is_imported())
    if name not in names:
        found = f"defines {', '.join(names)} at top level, not" if names else "does not define"
        file = f"{path}:" if keys[0] == keys[1] else ""
        setting = f"{keys[1]}={file}{names[0] if len(names) == 1 else 'NAME'}"
        raise ConfigError(f"{path} {found} {name}; rename the function or set {setting}")
    for function in tree.body:
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.name == name:
            _require_parameters(path, function, parameters)


def require_loss(path: str | None, name: str) -> None:
    """Raise ConfigError unless the file of algorithm.custom_loss, if set, defines the function."""
    if path is not None:
        require_function(Path(path), name, LOSS_KEYS, LOSS_PARAMETERS)


def _require_parameters(
    path: Path, function: ast.FunctionDef | ast.AsyncFunctionDef, parameters: Sequence[str]
) -> None:
    """Raise ConfigError unless the function can be called with these keyword arguments."""
    signature = function.args
    named = {argument.arg for argument in (*signature.args, *signature.kwonlyargs)}
    num_required = len(signature.args) - len(signature.defaults)
    keywords = zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
    obligatory = [*signature.posonlyargs, *signature.args[:num_required]]
    obligatory += [argument for argument, default in keywords if default is None]
    required = {argument.arg for argument in obligatory}
    is_missing = not signature.kwarg and not named.issuperset(parameters)
    if is_missing or not required.issubset(parameters):
        raise ConfigError(
            f"{function.name}({ast.unparse(signature)}) in {path} cannot be called as "
            f"{function.name}({', '.join(f'{parameter}=...' for parameter in parameters)}); rename "
            "its parameters, or the arguments that the recipe adds"
        )


def load_scorer(
    path: str | None = None, name: str = "", more: str = "{}"
) -> Callable[..., tuple[Any, ...]]:
    """Return the function that a scoring process runs; `more` are JSON arguments of the user's.

    It takes a scorer's name (None for the user's function) and PARAMETERS, and returns the fields
    of a Score. Exceptions of the scorer propagate.
    """
    function = None if path is None else partial(load_function(path, name), **json.loads(more))
    runner = asyncio.Runner()

    def score(scorer: str | None, *arguments: Any) -> tuple[Any, ...]:
        if scorer is not None:
            result = SCORERS[scorer](arguments[1], arguments[2])
        else:
            assert function is not None
            result = call_function(function, runner, arguments)
        answer = result.answer and result.answer[:MAX_ANSWER_CHARACTERS]
        return result.value, result.verdict, answer, result.acc

    return score


def scorer_arguments(custom: CustomRewardConfig) -> tuple[str, ...]:
    """Return the arguments with which a scoring process calls `load_scorer`."""
    return () if custom.path is None else (custom.path, custom.name, json.dumps(custom.arguments))


def load_function(path: str, name: str, key: str = "custom_reward.path") -> Callable[..., Any]:
    """Execute the file as a module and return the function; the file's exceptions propagate.

    The file is always compiled: Python's bytecode cache misses a same-size change within one
    second.
    """
    spec = importlib.util.spec_from_file_location(key.rpartition(".")[0], path)
    if spec is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
        raise ConfigError(f"{key}={path} is not a Python file (*.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses in the file resolve their annotations there
    exec(spec.loader.source_to_code(Path(path).read_bytes(), path), module.__dict__)
    function: Callable[..., Any] = getattr(module, name)
    return function


def call_function(
    function: Callable[..., Any], runner: asyncio.Runner, arguments: tuple[Any, ...]
) -> Score:
    """Score one response with the user's function, sync or async; its exceptions propagate."""
    result = function(**dict(zip(PARAMETERS, arguments, strict=True)))
    if inspect.isawaitable(result):
        result = runner.run(_awaited(result))
    return to_score(result)


async def _awaited(awaitable: Any) -> Any:
    return await awaitable


def to_score(result: Any) -> Score:
    """Convert a number, or a mapping with `score` and optionally `acc` and `pred`, to a Score.

    As in verl, `acc` defaults to the score. The verdict is right iff acc >= 1. Raises TypeError for
    a non-number, ValueError for NaN and from MAX_NUMBER on, KeyError for a mapping without score.
    """
    fields: Mapping[str, Any] = result if isinstance(result, Mapping) else {"score": result}
    value = _number("score", fields["score"])
    acc = _number("acc", fields["acc"]) if fields.get("acc") is not None else value
    answer = fields.get("pred")
    return Score(
        value, "right" if acc >= 1 else "wrong", None if answer is None else str(answer), acc
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}: {value!r:.200}")
    number = float(value)
    if not abs(number) < MAX_NUMBER:  # NaN too
        raise ValueError(f"{name} must be finite and below {MAX_NUMBER:g}, not {number}")
    return number
