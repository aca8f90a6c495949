"""The checked request: the runs, their common parts, what to measure and when."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dcliques_jax import _checks, _random, models, partitions
from dcliques_jax._algorithms.contract import with_state
from dcliques_jax._engine import sampling
from dcliques_jax._engine.outages import Faults
from dcliques_jax.algorithms import Algorithm, Network, Traffic
from dcliques_jax.datasets import Dataset
from dcliques_jax.faults import Fault
from dcliques_jax.metrics import Metric
from dcliques_jax.partitions import PartitionedDataset
from dcliques_jax.topologies import Topology

_BATCH_SHARE = 128 / 500  # of a node's examples: the paper's batch size for MNIST on 100 nodes; gives 13 on 1000


class Run(NamedTuple):
    """The parts that differ between runs that are simulated together."""

    topology: Topology
    data: PartitionedDataset
    seed: int
    values: Mapping[str, float] = {}  # the arguments of the algorithm in a sweep


class Recipe(NamedTuple):
    """The parts that all runs share."""

    model: models.StatefulModel
    model_name: str
    factory: Callable[..., Algorithm]  # of the values of a sweep
    loss_fn: Callable[[jax.Array, jax.Array], jax.Array]
    init: Any
    metrics: Mapping[str, Metric]
    faults: tuple[Fault, ...]
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None

    def algorithm_of(self, run: Run) -> Algorithm:
        """Returns the algorithm of a run."""
        return self.factory(**run.values)

    def sends(self, run: Run) -> Callable[[Network, Any], Traffic] | None:
        """Returns the traffic of a run as a function of the network and one node's (params, state); None if unknown."""
        of_algorithm = self.algorithm_of(run).traits.sends
        if of_algorithm is None:
            return None

        def traffic(network: Network, model: tuple[Any, Any]) -> Traffic:
            params, state = model
            sent = of_algorithm(network, params)
            return with_state(sent, network, state) if self.model.gossip_state else sent

        return traffic

    def faults_of(self, run: Run) -> Faults | None:
        """Returns the faults of a run; None if nothing fails."""
        return Faults(self.faults, run.data.num_nodes) if self.faults else None


class Plan(NamedTuple):
    """The batches of runs, and what to evaluate."""

    batch_size: int  # of the largest node
    rounds_per_epoch: int
    largest: int  # number of examples of the largest node of all runs
    width: int  # length of the longest list of examples
    sampling: str  # how nodes take batches, see `PartitionedDataset.sampled`
    ragged: bool  # whether runs shuffle lists that differ in length
    eval_nodes: int | list[int] | None
    eval_examples: int | None
    evaluate_on: str  # "test" or "validation"

    @property
    def order_width(self) -> int:
        """Number of examples in the order of an epoch, the longest of all nodes."""
        return self.batch_size * self.rounds_per_epoch if self.sampling == "with_replacement" else self.width

    def bounds(self, run: Run) -> np.ndarray:
        """Returns the bounds of the batches of each node in its order of an epoch, `[nodes, rounds per epoch + 1]`."""
        if self.sampling == "epochs":
            return sampling.bounds(run.data.sizes, self.batch_size, self.largest)
        return sampling.full_bounds(run.data.num_nodes, self.batch_size, self.rounds_per_epoch)

    def nodes(self, run: Run) -> np.ndarray:
        """Returns the evaluated nodes of a run."""
        if isinstance(self.eval_nodes, list):
            return np.array(self.eval_nodes)
        return _subset(self.eval_nodes, run.data.num_nodes, _random.generator(run.seed, 1))

    def examples(self, run: Run) -> np.ndarray:
        """Returns the evaluated examples of a run."""
        available = len(evaluation_set(run.data.dataset, self.evaluate_on)[1])
        return _subset(self.eval_examples, available, _random.generator(run.seed, 2))


class Schedule(NamedTuple):
    """The length of runs, and when to evaluate them."""

    requested: dict[str, Any]  # the requested length, in epochs or rounds, and `eval_every`
    evaluated: list[int]  # the rounds after which to evaluate, from the first to the last

    def after(self, evaluated: list[int], last: int) -> "Schedule":
        """Returns the schedule of a run that is at round `last` and was evaluated after the rounds `evaluated`."""
        later = [at for at in self.evaluated if at >= last and not (evaluated and at <= evaluated[-1])]
        return self._replace(evaluated=evaluated + later)

    def extension(self, last: int, rounds_per_epoch: int) -> int:
        """Returns the extension, in epochs or rounds, that a run at round `last` needs."""
        trained = last - self.evaluated[0]
        if "rounds" in self.requested:
            return trained - self.requested["rounds"]
        return -(-trained // rounds_per_epoch) - self.requested["epochs"]


def evaluation_set(dataset: Dataset, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and labels of the evaluated split."""
    if split == "test":
        return dataset.test_inputs, dataset.test_labels
    if dataset.validation_inputs is None or dataset.validation_labels is None:
        raise ValueError(
            f"evaluate_on={split!r}, but {dataset.name} has no validation examples: pass evaluate_on='test', or a data "
            "set that has them"
        )
    return dataset.validation_inputs, dataset.validation_labels


def make_runs(topology: Any, dataset: Any, seed: int, seeds: Sequence[int] | None) -> list[Run]:
    """Makes one run per seed. Topologies and data sets may be lists with one entry per seed."""
    if seeds is not None and seed != 0:
        raise ValueError(f"seed={seed} and seeds={seeds}: pass either, not both")
    if seeds is None:
        seed = _checks.integer("seed", seed, 0, 2**32 - 1)
        return [Run(topology, _partitioned(topology, dataset, seed), seed)]
    if np.ndim(seeds) != 1 or len(seeds) == 0:
        raise ValueError(f"seeds={seeds!r} must be a list of integers, one per run")
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
            raise ValueError(f"the data of seed {run.seed} is not from the same Dataset as that of seed {numbers[0]}")
        if run.data.sampling != runs[0].data.sampling:
            raise ValueError(
                f"the data of seed {run.seed} is sampled by {run.data.sampling!r}, that of seed {numbers[0]} by "
                f"{runs[0].data.sampling!r}: use the same for every seed"
            )
        if (run.data.test_indices is None) != (runs[0].data.test_indices is None):
            raise ValueError(
                f"only one of seeds {run.seed} and {numbers[0]} has test examples per node: give them to both"
            )
        if run.data.num_nodes != runs[0].data.num_nodes:
            raise ValueError(
                f"the data of seed {run.seed} is split over {run.data.num_nodes} nodes, that of seed {numbers[0]} over "
                f"{runs[0].data.num_nodes}: use as many nodes for every seed"
            )
    return runs


def _one_each(name: str, value: Any, count: int) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValueError(f"{name} is a list of {len(value)} for {count} seeds: pass one per seed, or one for all")
    return list(value)


def _partitioned(topology: Topology, dataset: PartitionedDataset | Dataset, seed: int) -> PartitionedDataset:
    if not isinstance(topology, Topology):
        raise ValueError(f"topology={topology!r} is not a Topology: build one with dcliques_jax.topologies")
    if isinstance(dataset, Dataset):
        return partitions.iid(dataset, topology.num_nodes, seed=seed)
    if not isinstance(dataset, PartitionedDataset):
        raise ValueError(f"dataset={dataset!r} is not a data set: build one with dcliques_jax.datasets and .partitions")
    if topology.num_nodes != dataset.num_nodes:
        raise ValueError(
            f"the topology has {topology.num_nodes} nodes but the data is split over {dataset.num_nodes}: use the "
            "same number for both"
        )
    return dataset


def make_plan(
    runs: list[Run],
    *,
    batch_size: int | None = None,
    eval_nodes: int | Sequence[int] | None = None,
    eval_examples: int | None = None,
    evaluate_on: str = "test",
) -> Plan:
    """Makes the plan of all runs."""
    data = runs[0].data
    largest = max(int(run.data.sizes.max()) for run in runs)
    widths = {run.data.indices.shape[1] for run in runs}
    if batch_size is None:
        batch_size = int(np.ceil(_BATCH_SHARE * largest))
    batch_size = _checks.integer("batch_size", batch_size, 1, largest, "the examples of the largest node")
    if eval_nodes is not None and np.ndim(eval_nodes) == 0:
        eval_nodes = _checks.integer("eval_nodes", eval_nodes, 1, data.num_nodes)
    elif eval_nodes is not None:
        eval_nodes = _numbers("eval_nodes", eval_nodes, data.num_nodes - 1, "the last node")
    _checks.choice("evaluate_on", evaluate_on, ("test", "validation"))
    available = len(evaluation_set(data.dataset, evaluate_on)[1])
    if eval_examples is not None:
        eval_examples = _checks.integer("eval_examples", eval_examples, 1, available)
    per_epoch, how = sampling.rounds_per_epoch(np.array([largest]), batch_size), data.sampling
    if how == "full_batches":
        smallest = min(int(run.data.sizes.min()) for run in runs)
        _checks.integer("batch_size", batch_size, 1, smallest, "the examples of the smallest node, which fill a batch")
        per_epoch = smallest // batch_size
    lists = (largest, max(widths), how, how != "with_replacement" and len(widths) > 1)
    return Plan(batch_size, per_epoch, *lists, eval_nodes, eval_examples, evaluate_on)


def make_schedule(
    plan: Plan,
    first: int = 0,
    *,
    epochs: int | None = None,
    rounds: int | None = None,
    extend: int = 0,
    eval_every: int | Sequence[int] = 1,
) -> Schedule:
    """Makes the schedule of runs that are at round `first`."""
    if epochs is not None and rounds is not None:
        raise ValueError(f"epochs={epochs} and rounds={rounds}: pass either, not both")
    if rounds is not None:
        length, unit = {"rounds": _checks.integer("rounds", rounds, 0)}, 1
    else:
        length = {"epochs": _checks.integer("epochs", 10 if epochs is None else epochs, 0)}
        unit = plan.rounds_per_epoch
    (requested,) = length.values()
    last = requested + _checks.integer("extend", extend, 0)
    if np.ndim(eval_every) == 0:
        eval_every = _checks.integer("eval_every", eval_every, 1)
        between = {*range(0, last, eval_every)}
    else:
        eval_every = _numbers("eval_every", eval_every, last, "the length of the run")
        between = set(eval_every)
    # At the start, at the end, and at the end of an extension.
    evaluated = [first + unit * at for at in sorted({0, *between, requested, last})]
    return Schedule({**length, "eval_every": eval_every}, evaluated)


def _numbers(name: str, values: Any, most: int, why: str) -> list[int]:
    """Checks that the values are different integers from 0 to `most`."""
    found = [_checks.integer(name, value, 0, most, why) for value in values]
    if len(set(found)) != len(found) or not found:
        raise ValueError(f"{name}={values!r} must hold different numbers, and at least one")
    return found


def _subset(count: int | None, available: int, rng: np.random.Generator) -> np.ndarray:
    """Returns all or `count` random numbers of 0 .. available - 1, sorted."""
    return np.arange(available) if count is None else np.sort(rng.choice(available, count, replace=False))
