"""The reward: a function of prompt, response and ground truth, the user's or the embedded task's.

    def my_reward(prompt: str, response: str, ground_truth: str | None, **extra) -> float: ...

`reward.path` names it, as `module:function` or `file.py:function`. `extra` holds `reward.reward_kwargs` and the other
columns of the prompt's row; a function without `**extra` gets those that it names.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from numbers import Number, Real
from pathlib import Path
from types import ModuleType
from typing import Any

from milepost.errors import ConfigError
from milepost.trainer.task import addition_score

RewardFunction = Callable[..., float]
"""Called as f(prompt, response, ground_truth, **columns)."""


def load_reward(path: str | None, kwargs: Mapping[str, Any] | None = None) -> RewardFunction:
    """Find a reward function and bind `kwargs` to it.

    Args:
        path: `module:function`, with the working directory on the search path, or `file.py:function`. None: the
            embedded task's, `addition_score`.
        kwargs: keyword arguments for every call. A column of the same name wins.

    Raises:
        ConfigError: there is no such module, file or function, or it cannot take what it is called with.
    """
    function = addition_score if path is None else _find(path)
    accepted = _keywords(function, path)

    def reward(prompt: str, response: str, ground_truth: str | None, **columns: Any) -> float:
        extra = {**(kwargs or {}), **columns}
        if accepted is not None:
            extra = {name: value for name, value in extra.items() if name in accepted}
        return function(prompt, response, ground_truth, **extra)

    unknown = sorted(set(kwargs or {}) - (accepted if accepted is not None else set(kwargs or {})))
    if unknown:
        raise ConfigError(f"reward.reward_kwargs: {path or 'the additions'} takes no argument {', '.join(unknown)}")
    return reward


def score_responses(
    reward: RewardFunction,
    prompts: Sequence[str],
    responses: Sequence[str],
    ground_truths: Sequence[str | None],
    extras: Sequence[Mapping[str, Any]] | None = None,
    numbers: Sequence[int] | None = None,
) -> list[float]:
    """The score of each response.

    Args:
        reward: from `load_reward`.
        prompts, responses: text; the response as decoded, without special tokens.
        ground_truths: as the data has them.
        extras: the other columns of each row.
        numbers: positions in the data set, for messages; None: positions in this batch.

    Raises:
        ConfigError: the function raised, or returned something that is no finite number; names the prompt.
    """
    scores: list[float] = []
    for i, (prompt, response, truth) in enumerate(zip(prompts, responses, ground_truths, strict=True)):
        number = numbers[i] if numbers is not None else i
        where = f"reward function, prompt {number} ({prompt[-40:]!r})"
        try:
            score = reward(prompt, response, truth, **(extras[i] if extras is not None else {}))
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{where}: raised {type(error).__name__}: {error}") from error
        scores.append(_finite(score, where))
    return scores


def _finite(score: object, where: str) -> float:
    """A Python, numpy or torch number as a float."""
    value = score.item() if hasattr(score, "item") and not isinstance(score, Number) else score
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigError(f"{where}: returned {score!r}, not a finite number")
    return float(value)


def _find(path: str) -> RewardFunction:
    where, _, name = path.rpartition(":")
    module = _load_file(Path(where).expanduser(), path) if where.endswith(".py") else _load_module(where, path)
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"reward.path={path}: {where} has no function {name!r}")
    return function  # type: ignore[no-any-return]


def _load_module(name: str, path: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise ConfigError(f"reward.path={path}: cannot import {name!r}: {type(error).__name__}: {error}") from error


def _load_file(file: Path, path: str) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"reward.path={path}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(f"milepost_reward_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"reward.path={path}: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"reward.path={path}: cannot import {file}: {type(error).__name__}: {error}") from error
    return module


def _keywords(function: RewardFunction, path: str | None) -> set[str] | None:
    """The names that `function` takes beside the three, None where it takes any."""
    try:
        signature = inspect.signature(function)
        signature.bind_partial("", "", None)
    except TypeError as error:
        raise ConfigError(
            f"reward.path={path}: must be callable as f(prompt, response, ground_truth, **extra): {error}"
        ) from error
    except ValueError:  # a builtin without a signature
        return None
    parameters = list(signature.parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {p.name for p in parameters[3:] if p.kind is not p.POSITIONAL_ONLY}
