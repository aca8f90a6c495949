"""Sweeps over arguments of an algorithm: all combinations are runs of one program."""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dcliques_jax import _checks
from dcliques_jax._engine.fit import check_algorithm
from dcliques_jax._engine.plan import Run
from dcliques_jax.algorithms import Algorithm


def make_runs(
    runs: list[Run], sweep: Mapping[str, Sequence[float]] | None, several_seeds: bool
) -> tuple[list[Run], tuple[int, ...]]:
    """Repeats the runs of all seeds for every combination; returns the axes of runs that the user sees, too."""
    seeds = (len(runs),) if several_seeds else ()
    if sweep is None:
        return runs, seeds
    if not isinstance(sweep, Mapping) or not sweep:
        raise ValueError(f"sweep={sweep!r} must be a dictionary, for example sweep={{'learning_rate': [0.03, 0.1]}}")
    values = {name: _values(name, given) for name, given in sweep.items()}
    combinations = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    return [run._replace(values=one) for one in combinations for run in runs], (*map(len, values.values()), *seeds)


def _values(name: Any, given: Any) -> list[float]:
    if not isinstance(name, str):
        raise ValueError(f"sweep has the key {name!r}: keys are the names of arguments of the algorithm")
    if isinstance(given, str) or not hasattr(given, "__len__") or len(given) == 0:
        raise ValueError(f"sweep[{name!r}]={given!r} must be a list of numbers, and hold at least one")
    values = [_checks.real(f"sweep[{name!r}]", value, -math.inf) for value in given]
    if len(set(values)) < len(values):
        raise ValueError(f"sweep[{name!r}]={given!r} must hold different numbers")
    return values


def factory(algorithm: Any, runs: list[Run]) -> Callable[..., Algorithm]:
    """Returns the function that makes the algorithm of a run, after checking it with numbers and with traced values."""
    if not runs[0].values:
        check_algorithm(algorithm)
        return lambda: algorithm
    if isinstance(algorithm, Algorithm) or not callable(algorithm):
        raise ValueError(
            "sweep needs an algorithm that is a function of its arguments, for example "
            "lambda learning_rate: algorithms.dsgd(optax.sgd(learning_rate))"
        )
    names = list(runs[0].values)
    try:
        inspect.signature(algorithm).bind(**runs[0].values)
    except TypeError as error:
        raise ValueError(f"sweep has the arguments {names}, which algorithm does not take ({error})") from None
    traced = {name: jax.ShapeDtypeStruct((), jnp.result_type(float)) for name in names}
    try:
        jax.eval_shape(lambda values: [None, algorithm(**values)][0], traced)
    except (jax.errors.JAXTypeError, ValueError) as error:  # checks of numbers raise the latter
        told = str(error).partition("\n")[0]
        raise ValueError(
            f"algorithm does not accept traced values of {names}: in a sweep it is called while the program is traced, "
            "so it must not compare, round or convert them; sweep over other arguments, or loop over calls of simulate "
            f"({told})"
        ) from error
    check_algorithm(algorithm(**runs[0].values))
    return functools.partial(algorithm)
