"""Checks the arguments of `simulate` and builds runs, plan, recipe and networks from them."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from dcliques_jax import _checks, algorithms, models
from dcliques_jax import faults as faults_lib
from dcliques_jax import metrics as metrics_lib
from dcliques_jax._engine import cache_key, fit, memory, outages, sweeps
from dcliques_jax._engine.plan import Plan, Recipe, Run, make_plan, make_runs
from dcliques_jax._engine.simulation import Simulation
from dcliques_jax._mesh import guards, transfer
from dcliques_jax.algorithms import Network
from dcliques_jax.datasets import Dataset
from dcliques_jax.results import State


class Setup(NamedTuple):
    """The checked parts of all runs. Nothing is compiled yet."""

    runs: list[Run]
    plan: Plan
    recipe: Recipe
    networks: list[Network]  # one per run
    one_node: tuple[Any, Any]  # shapes of the parameters and the state of one node's model
    needed: memory.Forecast  # memory of one run
    mesh: Mesh | None
    axes: tuple[int, ...]  # of all runs, as the user sees them: of a sweep, and of seeds if there is a list of them
    on_nonfinite: str

    def runs_at_once(self) -> int:
        """Returns how many runs fit into memory twice: they are copied at the start and at the end."""
        fitting = max(1, memory.available(self.mesh) // max(1, 2 * self.needed.total))
        return min(len(self.runs), transfer.of_first_process(fitting))  # all processes must agree

    def simulation(self, start: int = 0, stop: int | None = None) -> Simulation:
        """Returns the simulation of some of the runs together, by default of all."""
        part, recipe = slice(start, stop), self.recipe
        some = len(self.runs[part])
        if isinstance(recipe.init, State) and len(self.runs) > 1:
            given = recipe.init if np.ndim(recipe.init.round) else jax.tree.map(lambda leaf: leaf[None], recipe.init)
            numbers = np.arange(len(self.runs))[part] % len(given.round)  # every combination of a sweep starts alike
            recipe = recipe._replace(init=jax.tree.map(lambda leaf: leaf[numbers], given))
        return Simulation(
            self.runs[part],
            self.plan,
            recipe,
            self.networks[part],
            mesh=self.mesh,
            axes=self.axes if some == len(self.runs) else (some,),
            on_nonfinite=self.on_nonfinite,
        )


def make_setup(
    topology: Any,
    dataset: Any,
    *,
    model: Any,
    algorithm: Any,
    loss_fn: Callable[[jax.Array, jax.Array], jax.Array] | None,
    batch_size: int | None,
    init: Any,
    eval_nodes: int | Sequence[int] | None,
    eval_examples: int | None,
    evaluate_on: str,
    faults: Any,
    metrics: Mapping[str, Any] | None,
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None,
    on_nonfinite: str,
    seed: int,
    sweep: Mapping[str, Sequence[float]] | None,
    seeds: Sequence[int] | None,
    mesh: Mesh | None,
) -> Setup:
    """Checks all arguments before anything is compiled; see `dcliques_jax.simulate`."""
    _checks.choice("on_nonfinite", on_nonfinite, ("raise", "warn"))
    mesh = None if mesh is None else guards.check_mesh(mesh)
    runs, axes = sweeps.make_runs(make_runs(topology, dataset, seed, seeds), sweep, seeds is not None)
    evaluated: dict[str, Any] = {"eval_nodes": eval_nodes, "eval_examples": eval_examples, "evaluate_on": evaluate_on}
    plan = make_plan(runs, batch_size=batch_size, **evaluated)
    model, loss_fn = _defaults(runs[0].data.dataset, model, loss_fn)
    factory = sweeps.factory(algorithms.dsgd() if algorithm is None else algorithm, runs)
    _check_seeds(init, sum(run.values == runs[0].values for run in runs))
    happening = faults_lib.as_faults(faults, runs[0].data.num_nodes)
    parts = (factory, _alive(loss_fn), init, fit.check_metrics(metrics), happening, _alive(augment, "augment"))
    recipe = Recipe(_alive_model(model), models.described(model), *parts)
    networks = outages.with_links([fit.make_network(run, recipe) for run in runs], recipe.faults)
    with cache_key.fresh_traces():
        each = zip(runs, networks, strict=True)  # all combinations of a sweep have the same shapes
        fits = [fit.check_fit(run, plan, recipe, part) for run, part in each if run.values == runs[0].values]
    *one_node, state = fits[0]
    recipe = recipe._replace(model_name=models.described(model, one_node[1]))
    widest = max(range(len(runs)), key=lambda number: runs[number].data.indices.shape[1])
    needed = memory.forecast(runs[widest], one_node, state, networks[widest])
    memory.check(runs[0], needed, mesh)
    return Setup(runs, plan, recipe, networks, tuple(one_node), needed, mesh, axes, "warn" if sweep else on_nonfinite)


def _defaults(dataset: Dataset, model: Any, loss_fn: Any) -> tuple[Any, Any]:
    """Chooses a model and a loss for the labels of a data set unless they are given."""
    if model is None and dataset.target_kind != "classes":
        raise ValueError(f"{dataset.name} has {dataset.target_kind} to predict: pass a model")
    if loss_fn is not None and not callable(loss_fn):
        raise ValueError(f"loss_fn={loss_fn!r} is not a function: omit it for the usual loss")
    if loss_fn is None:
        loss_fn = metrics_lib.cross_entropy if dataset.num_classes else metrics_lib.squared_error
    return models.logistic_regression(dataset.num_classes) if model is None else model, loss_fn


def _alive(function: Any, name: str = "") -> Any:
    """Wraps a function so that it lives for one call: JAX keeps its traces and their constants while it lives."""
    if function is None:
        return None
    if not callable(function):
        raise ValueError(f"{name}={function!r} is not a function (key, inputs) -> inputs: see augmentations")
    return functools.partial(function)


def _alive_model(model: Any) -> models.StatefulModel:
    found = models.as_model(model)
    return found._replace(init=_alive(found.init), apply=_alive(found.apply))


def _check_seeds(init: Any, num_seeds: int) -> None:
    """Raises a `ValueError` if a state has another number of seeds, or seeds after different rounds."""
    if not isinstance(init, State):
        return
    if np.ndim(init.round) > 1:
        raise ValueError("init is the state of a sweep: pass that of one combination, such as result.best().state")
    given = len(init.round) if jax.numpy.ndim(init.round) else 1  # runs from one state would draw the same numbers
    if given != num_seeds:
        raise ValueError(f"init is the state of {given} seeds, but there are {num_seeds}: pass as many seeds as it has")
    if len(numbers := np.unique(init.round)) > 1:  # seeds run in step
        raise ValueError(f"init holds states after different rounds, {numbers}: pass states after the same round")
