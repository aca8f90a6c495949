"""What `simulate` was asked for, checked: its runs, how long they last, and what is evaluated when."""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcliques_jax import _checks, models, partitions, sampling
from dcliques_jax._devices import as_arrays
from dcliques_jax._programs import Params, stacked
from dcliques_jax.algorithms import Algorithm
from dcliques_jax.datasets import Dataset
from dcliques_jax.partitions import PartitionedDataset
from dcliques_jax.topologies import Topology

INITS = ("shared", "averaged", "independent")
_BATCH_SHARE = 128 / 500  # of a node's examples: the paper's batch size for MNIST on 100 nodes, and 13 on 1000


_SLOW_CONVOLUTION = (
    "the model has convolutions that XLA runs many times slower on CPUs than those of dcliques_jax.layers.Conv, which "
    "takes the place of flax's nn.Conv and has the same parameters"
)


class Run(NamedTuple):
    """What differs between runs that are simulated together."""

    topology: Topology
    data: PartitionedDataset
    seed: int


class Parts(NamedTuple):
    """What they have in common."""

    model: models.Model
    model_name: str
    algorithm: Algorithm
    loss_fn: Callable[[jax.Array, jax.Array], jax.Array]
    init: Any


class Plan(NamedTuple):
    """How long runs last, in which batches, and what is evaluated when."""

    batch_size: int  # of the largest node
    rounds_per_epoch: int
    largest: int  # examples of the largest node of all runs
    width: int  # of the longest list of examples
    ragged: bool  # whether lists of runs differ in length
    asked: dict[str, Any]  # how long, and how often to evaluate, in epochs or rounds
    evaluated: list[int]  # the rounds after which models are evaluated: 0, .., the last
    eval_nodes: int | list[int] | None
    eval_examples: int | None

    def nodes(self, run: Run) -> np.ndarray:
        """The nodes of a run that are evaluated."""
        if isinstance(self.eval_nodes, list):
            return np.array(self.eval_nodes)
        return _subset(self.eval_nodes, run.data.num_nodes, _checks.generator(run.seed, 1))

    def examples(self, run: Run) -> np.ndarray:
        """The test examples on which they are."""
        return _subset(self.eval_examples, len(run.data.dataset.test_labels), _checks.generator(run.seed, 2))

    def after(self, evaluated: list[int], last: int) -> "Plan":
        """The plan of a run that has been evaluated after these rounds already, and is at round `last`."""
        later = [at for at in self.evaluated if at >= last and not (evaluated and at <= evaluated[-1])]
        return self._replace(evaluated=evaluated + later)

    def following(self, evaluated: list[int]) -> "Plan":
        """The plan of runs that are evaluated after the very rounds of others."""
        return self._replace(evaluated=evaluated)

    def extension(self, last: int) -> int:
        """By how much to extend the plan for a run that is as far as a round, in epochs or rounds."""
        if "rounds" in self.asked:
            return last - self.asked["rounds"]
        return -(-last // self.rounds_per_epoch) - self.asked["epochs"]


def make_runs(topology: Any, dataset: Any, seed: int, seeds: Sequence[int] | None) -> list[Run]:
    """One run for each seed. Topologies and data sets may be lists, one for each seed."""
    if seeds is not None and seed != 0:
        raise ValueError(f"seed={seed} and seeds={seeds} exclude each other: give one")
    if seeds is None:
        seed = _checks.integer("seed", seed, 0, 2**32 - 1)
        return [Run(topology, _partitioned(topology, dataset, seed), seed)]
    if np.ndim(seeds) != 1 or len(seeds) == 0:
        raise ValueError(f"seeds={seeds!r} must be a list of integers, one for each run")
    numbers = [_checks.integer("seeds", number, 0, 2**32 - 1) for number in seeds]
    topologies, datasets = (
        _one_each(name, value, len(numbers)) for name, value in (("topology", topology), ("dataset", dataset))
    )
    runs = [
        Run(graph, _partitioned(graph, data, number), number)
        for graph, data, number in zip(topologies, datasets, numbers, strict=True)
    ]
    for run in runs[1:]:
        if run.data.dataset is not runs[0].data.dataset:
            raise ValueError(f"the data of seed {run.seed} is not split from the same Dataset as that of {numbers[0]}")
        if run.data.num_nodes != runs[0].data.num_nodes:
            raise ValueError(
                f"the data of seed {run.seed} is split over {run.data.num_nodes} nodes, that of seed {numbers[0]} over "
                f"{runs[0].data.num_nodes}: pass as many nodes for every seed"
            )
    return runs


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} is a list of {len(value)} for {count} seeds: give one for each seed, or one for all")
    return list(value)


def _partitioned(topology: Topology, dataset: PartitionedDataset | Dataset, seed: int) -> PartitionedDataset:
    if not isinstance(topology, Topology):
        raise ValueError(f"topology={topology!r} is no Topology: build one with dcliques_jax.topologies")
    if isinstance(dataset, Dataset):
        return partitions.iid(dataset, topology.num_nodes, seed=seed)
    if not isinstance(dataset, PartitionedDataset):
        raise ValueError(f"dataset={dataset!r} is no data set: build one with dcliques_jax.datasets and .partitions")
    if topology.num_nodes != dataset.num_nodes:
        raise ValueError(
            f"the topology has {topology.num_nodes} nodes but the data is split over {dataset.num_nodes}: build both "
            "for the same number"
        )
    return dataset


def make_plan(
    runs: list[Run],
    *,
    epochs: int | None = None,
    rounds: int | None = None,
    extend: int = 0,
    batch_size: int | None = None,
    eval_every: int | Sequence[int] = 1,
    eval_nodes: int | Sequence[int] | None = None,
    eval_examples: int | None = None,
) -> Plan:
    """The plan that all runs follow."""
    data = runs[0].data
    largest = max(int(run.data.sizes.max()) for run in runs)
    widths = {run.data.indices.shape[1] for run in runs}
    if batch_size is None:
        batch_size = int(np.ceil(_BATCH_SHARE * largest))
    batch_size = _checks.integer("batch_size", batch_size, 1, largest, "the examples of the largest node")
    per_epoch = sampling.rounds_per_epoch(np.array([largest]), batch_size)
    if epochs is not None and rounds is not None:
        raise ValueError(f"epochs={epochs} and rounds={rounds} exclude each other: give one")
    if rounds is not None:
        length, unit = {"rounds": _checks.integer("rounds", rounds, 0)}, 1
    else:
        length, unit = {"epochs": _checks.integer("epochs", 10 if epochs is None else epochs, 0)}, per_epoch
    (asked_length,) = length.values()
    last = asked_length + _checks.integer("extend", extend, 0)
    if np.ndim(eval_every) == 0:
        eval_every = _checks.integer("eval_every", eval_every, 1)
        between = {*range(0, last, eval_every)}
    else:
        eval_every = _numbers("eval_every", eval_every, last, "the length of the run")
        between = set(eval_every)
    # At the start, at the end, and at the end of an extension.
    evaluated = [unit * at for at in sorted({0, *between, asked_length, last})]
    if eval_nodes is not None and np.ndim(eval_nodes) == 0:
        eval_nodes = _checks.integer("eval_nodes", eval_nodes, 1, data.num_nodes)
    elif eval_nodes is not None:
        eval_nodes = _numbers("eval_nodes", eval_nodes, data.num_nodes - 1, "the last node")
    if eval_examples is not None:
        eval_examples = _checks.integer("eval_examples", eval_examples, 1, len(data.dataset.test_labels))
    asked = {**length, "eval_every": eval_every}
    shape = (largest, max(widths), len(widths) > 1)
    return Plan(batch_size, per_epoch, *shape, asked, evaluated, eval_nodes, eval_examples)


def _numbers(name: str, values: Any, most: int, why: str) -> list[int]:
    """Different whole numbers from 0 to `most`."""
    found = [_checks.integer(name, value, 0, most, why) for value in values]
    if len(set(found)) != len(found) or not found:
        raise ValueError(f"{name}={values!r} must hold different numbers, and at least one")
    return found


def _subset(count: int | None, available: int, rng: np.random.Generator) -> np.ndarray:
    """All, or that many at random, of 0 .. available - 1; in order."""
    return np.arange(available) if count is None else np.sort(rng.choice(available, count, replace=False))


def check_fit(run: Run, parts: Parts) -> Any:
    """Raises a `ValueError` where the pieces of a run do not fit together; traces them, but compiles nothing.

    Returns the shapes of the algorithm's state; None of one that looks at values.
    """
    model, _, algorithm, loss_fn, init = parts
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"algorithm={algorithm!r} is no algorithm: pass for example algorithms.dsgd(optax.sgd(0.1))")
    if not (callable(algorithm.init) and callable(algorithm.step)):
        raise ValueError(f"algorithm={algorithm!r} must have functions init and step")
    dataset = run.data.dataset
    examples = dataset.train_inputs[:1].repeat(2, axis=0)
    params = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)), examples)
    logits, expected = jax.eval_shape(model.apply, params, examples), (2, dataset.num_classes)
    if (shape := getattr(logits, "shape", None)) != expected:
        raise ValueError(
            f"the model returns logits of shape {shape} for two examples of {expected[1]} classes: "
            f"it must return {expected}"
        )
    if jax.default_backend() == "cpu" and "conv_general_dilated" in str(jax.make_jaxpr(model.apply)(params, examples)):
        warnings.warn(_SLOW_CONVOLUTION, UserWarning, stacklevel=3)
    losses = jax.eval_shape(loss_fn, logits, dataset.train_labels[:1].repeat(2))
    if getattr(losses, "shape", None) != (2,):
        raise ValueError(f"loss_fn returns {losses} for two examples: it must return one loss an example, not a mean")
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        raise ValueError(f"loss_fn returns {losses.dtype} losses: they must be real numbers to have a gradient")
    if isinstance(init, str):
        _checks.choice("init", init, INITS)
    elif _shapes(init) != _shapes(params):
        raise ValueError(f"init has leaves {_shapes(init)}, but one node's parameters are {_shapes(params)}")
    elif not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(init)):
        raise ValueError("init holds NaN or infinite values: pass finite parameters")
    with contextlib.suppress(jax.errors.JAXTypeError):  # an algorithm that looks at values shows its errors later
        params = jax.eval_shape(lambda params: stacked(params, run.data.num_nodes), params)
        state = jax.eval_shape(lambda params: as_arrays(algorithm.init(run.topology, params)), params)
        _check_step(algorithm, params, state)
        return state


def _check_step(algorithm: Algorithm, params: Any, state: Any) -> None:
    """Raises a `ValueError` unless a step returns parameters and state as it gets them."""
    after = jax.eval_shape(algorithm.step, params, params, state)
    if not isinstance(after, tuple) or len(after) != 2:
        raise ValueError(f"algorithm.step returns {type(after).__name__}: it must return (params, state)")
    for name, before, returned in zip(("params", "state"), (params, state), after, strict=True):
        structures: list[Any] = [jax.tree.structure(tree) for tree in (before, returned)]
        if structures[0] != structures[1]:
            raise ValueError(
                f"algorithm.step returns {name} of structure {structures[1]}, but takes {structures[0]}: it must "
                "return what the next round takes"
            )
        takes, gives = _shapes(before, exactly=True), _shapes(returned, exactly=True)
        wrong = [place for place in takes if takes[place] != gives[place]]
        if wrong:
            raise ValueError(
                f"algorithm.step returns {name}{wrong[0]} as {gives[wrong[0]]}, but takes {takes[wrong[0]]}: it must "
                "return what the next round takes"
            )


def _shapes(tree: Params, *, exactly: bool = False) -> dict[str, str]:
    """Type and shape of every leaf by its place in the tree; all floating-point types are alike unless `exactly`."""

    def described(leaf: Any) -> str:
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        floating = not exactly and jnp.issubdtype(array.dtype, jnp.floating)
        return f"{'float' if floating else array.dtype}{list(array.shape)}"

    return {jax.tree_util.keystr(place): described(leaf) for place, leaf in jax.tree_util.tree_leaves_with_path(tree)}
