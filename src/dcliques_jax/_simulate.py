"""The time loop: the only file that compiles anything."""

import contextlib
import functools
import itertools
import sys
import warnings
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from dcliques_jax import _checks, algorithms, metrics, models, partitions, sampling
from dcliques_jax._chunks import largest_result, over_nodes
from dcliques_jax._static import Static
from dcliques_jax.algorithms import Algorithm
from dcliques_jax.datasets import Dataset
from dcliques_jax.partitions import PartitionedDataset
from dcliques_jax.results import History, Result
from dcliques_jax.topologies import Topology

Params = Any

_INITS = ("shared", "averaged", "independent")
_BATCH_SHARE = 128 / 500  # of a node's examples: the paper's batch size for MNIST on 100 nodes, and 13 on 1000
_EVALUATION_BYTES = 2**24  # most memory for the largest intermediate result of evaluating one node
_EVALUATED_AT_ONCE = 1000  # most examples at a time


class Program(NamedTuple):
    """What a compiled program depends on besides the shapes of its arguments."""

    apply: Any  # (params, inputs) -> logits, for one node
    step: Any  # (params, gradients, state) -> (params, state), for all nodes
    batch_size: int
    rounds_per_epoch: int


class Plan(NamedTuple):
    """How long to run, in which batches, and what to evaluate when."""

    batch_size: int
    rounds_per_epoch: int
    evaluated: list[int]  # the rounds after which models are evaluated: 0, .., the last
    nodes: np.ndarray  # the nodes that are evaluated
    examples: np.ndarray  # the test examples on which they are

    def settings(self) -> dict[str, Any]:
        """What a `Result` keeps of it, besides its history."""
        return {
            "rounds": self.evaluated[-1],
            "rounds_per_epoch": self.rounds_per_epoch,
            "batch_size": self.batch_size,
        }


class Data(NamedTuple):
    """What stays the same in all rounds, on the device. Nodes are in the topology's order except where it says so."""

    inputs: jax.Array  # [train, ...] as bytes where the data set knows them
    byte_scale: tuple[float, float] | None  # (scale, shift) of the bytes
    labels: jax.Array  # [train]
    examples: jax.Array  # [nodes, most] the training examples of each node
    sizes: jax.Array  # [nodes]
    order: jax.Array  # [nodes] the node that is stored at each place
    bounds: jax.Array  # [places, rounds per epoch + 1] where the batches of the node at each place begin and end
    key: jax.Array


class Evaluation(NamedTuple):
    """What is measured after a round."""

    accuracy: Any  # [eval_nodes]
    loss: Any  # [eval_nodes]
    consensus_distance: Any  # []
    finite: Any  # [nodes] whether all parameters of a node are finite


class SimulationState(NamedTuple):
    """What the next round needs."""

    params: Params  # [nodes, ...] in every leaf
    algorithm: Any
    shuffled: jax.Array  # [nodes, most] the examples of each node in the order of this epoch
    round: jax.Array  # rounds run so far

    def reordered(self, algorithm: Algorithm, order: np.ndarray) -> "SimulationState":
        """The state with node `order[k]` at place k."""
        return SimulationState(
            params=jax.tree.map(lambda leaf: leaf[order], self.params),
            algorithm=self.algorithm if algorithm.reorder is None else algorithm.reorder(self.algorithm, order),
            shuffled=self.shuffled[order],
            round=self.round,
        )


def simulate(
    topology: Topology,
    dataset: PartitionedDataset | Dataset,
    *,
    model: Any = None,
    algorithm: Algorithm | None = None,
    epochs: int | None = None,
    rounds: int | None = None,
    batch_size: int | None = None,
    init: Any = "shared",
    eval_every: int = 1,
    eval_nodes: int | None = None,
    eval_examples: int | None = None,
    on_nonfinite: Literal["raise", "warn"] = "raise",
    seed: int = 0,
    progress: bool = True,
) -> Result:
    """Trains one model on every node of a topology and evaluates them all.

    A run is a pure function of its arguments: the same arguments give the same bits on the same kind of device.

    Args:
      topology: who talks to whom.
      dataset: which node holds what, from `partitions`. A plain `Dataset` is split IID over the nodes.
      model: a flax module or a pair of functions `(init, apply)`; `models.logistic_regression` by default.
      algorithm: one round; `algorithms.dsgd()` by default, with learning rate 0.1 and, where the topology has cliques,
        Clique Averaging.
      epochs: how long to train; 10 epochs by default. An epoch is one pass over the examples of every node.
      rounds: how long to train, counted in rounds instead.
      batch_size: examples that a node takes in a round. By default the share of the paper's MNIST runs, 128 of 500. If
        nodes differ in size it is that of the largest; the others take proportionally less.
      init: `"shared"` (all nodes start from one random model), `"averaged"` (all start from the mean of as many random
        models as there are nodes), `"independent"` (each starts from its own), or one node's parameters as a pytree.
      eval_every: epochs between evaluations, or rounds if `rounds` is given. The end is always evaluated; if the
        interval before it is shorter, it is compiled separately.
      eval_nodes: evaluate that many nodes only, drawn once by the seed.
      eval_examples: evaluate on that many test examples only, drawn once by the seed.
      on_nonfinite: what to do when a loss or a parameter is infinite or NaN: `"raise"` an error or `"warn"` once.
      seed: of the initial models, the order of examples and the subsets for evaluation.
      progress: whether to show a progress bar, if there is a terminal to show it in.

    >>> from dcliques_jax import datasets, partitions, topologies
    >>> data = partitions.shards(datasets.synthetic(), 10)
    >>> result = simulate(topologies.ring(10), data, epochs=2, progress=False)
    >>> result.history.round, result.history.accuracy.shape
    (array([0, 4, 8]), (3, 10))
    """
    dataset = _partitioned(topology, dataset, seed)
    _checks.choice("on_nonfinite", on_nonfinite, ("raise", "warn"))
    plan = _plan(dataset, epochs, rounds, batch_size, eval_every, eval_nodes, eval_examples, seed)
    model = models.as_model(models.logistic_regression(dataset.dataset.num_classes) if model is None else model)
    algorithm = algorithms.dsgd() if algorithm is None else algorithm
    _check_fit(topology, dataset, model, algorithm, init)

    program, state, data = _prepared(topology, dataset, model, algorithm, init, plan, seed)
    test = _test_chunks(dataset.dataset, plan, model, state.params)
    first_rounds = plan.evaluated[min(1, len(plan.evaluated) - 1)]
    memory = _memory(program, state, data, first_rounds) if first_rounds else 0
    some_nodes = None if eval_nodes is None else plan.nodes  # None spares the copy that picking all would be
    losses = counts = np.zeros((0, topology.num_nodes))  # [rounds since the last evaluation, nodes]
    evaluations, train_losses, warned = [], [], False
    with tqdm(total=plan.evaluated[-1], unit="round", desc=topology.name, disable=None if progress else True) as bar:
        if memory and not bar.disable:
            bar.write(f"{topology.name}: a round takes {memory / 1e6:,.0f} MB of memory", file=sys.stderr)
        for start, stop in itertools.pairwise([0, *plan.evaluated]):
            if stop > start:
                state, (losses, counts) = _run(program, state, data, num_rounds=stop - start)
            evaluation = _evaluate(Static(model.apply), state.params, data.order, some_nodes, test)
            evaluation, losses, counts = jax.device_get((evaluation, losses, counts))
            trouble = _nonfinite(stop, losses, evaluation, plan.nodes)
            if trouble and on_nonfinite == "raise":
                raise FloatingPointError(f"{trouble}. Lower the learning rate, or pass on_nonfinite='warn' to go on.")
            if trouble and not warned:
                warnings.warn(trouble, RuntimeWarning, stacklevel=2)
                warned = True
            evaluations.append(evaluation)
            train_losses.append(_mean_over_examples(losses, counts))
            bar.set_postfix(accuracy=f"{evaluation.accuracy.mean():.4f}", refresh=False)
            bar.update(stop - start)
    state = state.reordered(algorithm, np.argsort(data.order))
    settings = plan.settings() | {
        "dataset": dataset.dataset.name,
        "init": init if isinstance(init, str) else "given",
        "seed": int(seed),
        "memory_bytes": memory,
    }
    return Result(topology, _history(plan, evaluations, train_losses), state.params, state, settings)


@functools.partial(jax.jit, static_argnames=("program", "num_rounds"), donate_argnames="state")
def _run(
    program: Static[Program], state: SimulationState, data: Data, *, num_rounds: int
) -> tuple[SimulationState, tuple[jax.Array, jax.Array]]:
    """Runs rounds; returns the state, and losses and batch sizes `[rounds, nodes]`."""
    apply, step, batch_size, per_epoch = program.value

    def loss(params: Params, inputs: jax.Array, labels: jax.Array, taken: jax.Array) -> jax.Array:
        losses = metrics.cross_entropy(apply(params, inputs), labels)
        return jnp.sum(jnp.where(taken, losses, 0)) / jnp.maximum(taken.sum(), 1)

    def loss_and_gradient(params: Params, examples: jax.Array, taken: jax.Array) -> tuple[jax.Array, Params]:
        return jax.value_and_grad(loss)(params, *_taken(data, examples), taken)

    def one_round(state: SimulationState, _: None) -> tuple[SimulationState, tuple[jax.Array, jax.Array]]:
        epoch, turn = jnp.divmod(state.round, per_epoch)
        shuffled = jax.lax.cond(
            turn == 0,
            lambda: sampling.shuffle(data.key, epoch, data.examples, data.sizes)[data.order],
            lambda: state.shuffled,
        )
        examples, taken = sampling.batches(shuffled, data.bounds, turn, batch_size)
        losses, gradients = over_nodes(loss_and_gradient)(state.params, examples, taken)
        params, algorithm_state = step(state.params, gradients, state.algorithm)
        state = SimulationState(params, algorithm_state, shuffled, state.round + 1)
        return state, (losses, taken.sum(axis=1))

    state, (losses, counts) = jax.lax.scan(one_round, state, None, length=num_rounds)
    places = jnp.argsort(data.order)
    return state, (losses[:, places], counts[:, places])


def _memory(program: Static[Program], state: SimulationState, data: Data, num_rounds: int) -> int:
    """Bytes of device memory that rounds take at their peak, data and all."""
    needs: Any = _run.lower(program, state, data, num_rounds=num_rounds).compile().memory_analysis()
    held = needs.argument_size_in_bytes + needs.output_size_in_bytes - needs.alias_size_in_bytes
    return held + needs.temp_size_in_bytes


def _taken(data: Data, examples: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inputs and labels of some training examples, as the model sees them."""
    inputs, labels = (array.at[examples].get(mode="promise_in_bounds") for array in (data.inputs, data.labels))
    if data.byte_scale is not None:
        scale, shift = (jnp.asarray(value, jnp.float32) for value in data.byte_scale)
        inputs = inputs.astype(jnp.float32) * scale + shift
    return inputs, labels


@functools.partial(jax.jit, static_argnames="apply")
def _evaluate(
    apply: Static[Any],
    params: Params,
    order: jax.Array,
    nodes: jax.Array | None,
    test: tuple[jax.Array, jax.Array],
) -> Evaluation:
    """Evaluates some nodes, or all of them, that are stored in the given order."""
    evaluate, places = over_nodes(lambda node: metrics.evaluate(apply.value, node, *test)), jnp.argsort(order)
    if nodes is None:
        accuracy, loss = (values[places] for values in evaluate(params))
    else:
        accuracy, loss = evaluate(jax.tree.map(lambda leaf: leaf[places[nodes]], params))
    return Evaluation(accuracy, loss, metrics.consensus_distance(params), metrics.finite_nodes(params)[places])


@functools.partial(jax.jit, static_argnames=("init", "kind", "num_nodes"))
def _random_params(init: Static[Any], kind: str, num_nodes: int, key: jax.Array, example: jax.Array) -> Params:
    if kind == "shared":
        return _stacked(init.value(key, example), num_nodes)
    params = jax.vmap(init.value, in_axes=(0, None))(jax.random.split(key, num_nodes), example)
    if kind == "independent":
        return params
    return _stacked(jax.tree.map(lambda leaf: leaf.mean(axis=0), params), num_nodes)


def _stacked(params: Params, num_nodes: int) -> Params:
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_nodes, *jnp.shape(leaf))), params)


def _prepared(
    topology: Topology,
    dataset: PartitionedDataset,
    model: models.Model,
    algorithm: Algorithm,
    init: Any,
    plan: Plan,
    seed: int,
) -> tuple[Static[Program], SimulationState, Data]:
    """All that `_run` takes."""
    program = Static(Program(model.apply, algorithm.step, plan.batch_size, plan.rounds_per_epoch))
    init_key, sampling_key = jax.random.split(jax.random.key(seed, impl="threefry2x32"))
    params = _initial_params(init, model, dataset, init_key)
    order = _storage_order(topology, algorithm)
    data = _on_device(dataset, plan, order, sampling_key)
    state = SimulationState(params, algorithm.init(topology, params), data.examples, jnp.zeros((), jnp.int32))
    # The program takes over the buffers of the state: none may be the caller's, and none may occur twice.
    return program, jax.tree.map(jnp.array, state.reordered(algorithm, order)), data


def _storage_order(topology: Topology, algorithm: Algorithm) -> np.ndarray:
    """The node at each place: clique by clique, so that gossip reads most of its neighbours from the cache."""
    if topology.clique_ids is None or algorithm.reorder is None:
        return np.arange(topology.num_nodes)
    return np.argsort(topology.clique_ids, kind="stable")


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


def _initial_params(init: Any, model: models.Model, data: PartitionedDataset, key: jax.Array) -> Params:
    """The parameters of all nodes before training."""
    if isinstance(init, str):
        return _random_params(Static(model.init), init, data.num_nodes, key, data.dataset.train_inputs[:1])
    return _stacked(jax.tree.map(jnp.asarray, init), data.num_nodes)


def _check_fit(
    topology: Topology, data: PartitionedDataset, model: models.Model, algorithm: Algorithm, init: Any
) -> None:
    """Raises a `ValueError` where the pieces of a run do not fit together; traces them, but compiles nothing."""
    if not isinstance(algorithm, Algorithm):
        raise ValueError(f"algorithm={algorithm!r} is no algorithm: pass for example algorithms.dsgd(optax.sgd(0.1))")
    examples = data.dataset.train_inputs[:1].repeat(2, axis=0)
    params = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)), examples)
    logits, expected = jax.eval_shape(model.apply, params, examples), (2, data.dataset.num_classes)
    if logits.shape != expected:
        raise ValueError(
            f"the model returns logits of shape {logits.shape} for two examples of {expected[1]} classes: "
            f"it must return {expected}"
        )
    if isinstance(init, str):
        _checks.choice("init", init, _INITS)
    elif _shapes(init) != _shapes(params):
        raise ValueError(f"init has leaves {_shapes(init)}, but one node's parameters are {_shapes(params)}")
    elif not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(init)):
        raise ValueError("init holds NaN or infinite values: pass finite parameters")
    with contextlib.suppress(jax.errors.JAXTypeError):  # an algorithm that looks at values shows its errors later
        jax.eval_shape(lambda params: algorithm.init(topology, _stacked(params, data.num_nodes)), params)


def _shapes(tree: Params) -> dict[str, str]:
    """Type and shape of every leaf by its place in the tree; all floating-point types count as the same."""

    def described(leaf: Any) -> str:
        array = leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
        return f"{'float' if jnp.issubdtype(array.dtype, jnp.floating) else array.dtype}{list(array.shape)}"

    return {jax.tree_util.keystr(place): described(leaf) for place, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _on_device(data: PartitionedDataset, plan: Plan, order: np.ndarray, key: jax.Array) -> Data:
    return Data(
        inputs=jnp.asarray(data.dataset.train_inputs if data.dataset.byte_scale is None else data.dataset.train_bytes),
        byte_scale=data.dataset.byte_scale,
        labels=jnp.asarray(data.dataset.train_labels),
        examples=jnp.asarray(data.indices),
        sizes=jnp.asarray(data.sizes, jnp.int32),
        order=jnp.asarray(order, jnp.int32),
        bounds=jnp.asarray(sampling.bounds(data.sizes, plan.batch_size)[order], jnp.int32),
        key=key,
    )


def _test_chunks(dataset: Dataset, plan: Plan, model: models.Model, params: Params) -> tuple[jax.Array, jax.Array]:
    """The test examples as inputs `[chunks, chunk, ...]` and labels `[chunks, chunk]`, -1 where filled up.

    Chunks are so small that the largest intermediate result of one node's model stays within bounds.
    """
    one_node = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], params))
    largest = largest_result(model.apply, one_node, dataset.test_inputs[:1])
    examples = plan.examples
    chunks = -(-len(examples) // int(np.clip(_EVALUATION_BYTES // largest, 1, _EVALUATED_AT_ONCE)))
    chunk = -(-len(examples) // chunks)
    padded = np.resize(examples, chunks * chunk)
    labels = np.where(np.arange(len(padded)) < len(examples), dataset.test_labels[padded], -1)
    inputs = dataset.test_inputs[padded].reshape(chunks, chunk, *dataset.test_inputs.shape[1:])
    return jnp.asarray(inputs), jnp.asarray(labels.reshape(chunks, chunk))


def _history(plan: Plan, evaluations: list[Evaluation], train_losses: list[np.ndarray]) -> History:
    accuracy, loss, consensus_distance, _ = map(np.stack, zip(*evaluations, strict=True))
    return History(
        round=np.array(plan.evaluated),
        epoch=np.array(plan.evaluated) / plan.rounds_per_epoch,
        accuracy=accuracy,
        loss=loss,
        train_loss=np.stack(train_losses),
        consensus_distance=consensus_distance,
        eval_nodes=plan.nodes,
        eval_examples=plan.examples,
    )


def _nonfinite(last: int, losses: np.ndarray, evaluation: Evaluation, nodes: np.ndarray) -> str | None:
    """Where the first infinite or NaN value appeared, if any did; `losses` are those of the rounds up to `last`."""
    bad = ~np.isfinite(losses)
    if bad.any():
        row = int(bad.any(axis=1).argmax())
        return _place("training loss", last - len(losses) + row + 1, np.flatnonzero(bad[row]))
    if not evaluation.finite.all():
        return _place("parameters", last, np.flatnonzero(~evaluation.finite))
    if not np.isfinite(evaluation.loss).all():
        return _place("test loss", last, nodes[~np.isfinite(evaluation.loss)])
    return None


def _place(what: str, after: int, nodes: np.ndarray) -> str:
    others = f" and {len(nodes) - 1} others" if len(nodes) > 1 else ""
    return f"non-finite {what} in round {after} at node {nodes[0]}{others}"


def _mean_over_examples(losses: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mean loss of each node since the last evaluation, `[nodes]`; NaN where it saw no example."""
    seen = counts.sum(axis=0).astype(np.float64)
    return np.divide((losses * counts).sum(axis=0), seen, out=np.full(len(seen), np.nan), where=seen > 0)


def _plan(
    data: PartitionedDataset,
    epochs: int | None,
    rounds: int | None,
    batch_size: int | None,
    eval_every: int,
    eval_nodes: int | None,
    eval_examples: int | None,
    seed: int,
) -> Plan:
    largest = int(data.sizes.max())
    if batch_size is None:
        batch_size = int(np.ceil(_BATCH_SHARE * largest))
    batch_size = _checks.integer("batch_size", batch_size, 1, largest, "the examples of the largest node")
    per_epoch = sampling.rounds_per_epoch(data.sizes, batch_size)
    evaluated = _evaluated_rounds(epochs, rounds, eval_every, per_epoch)
    nodes = _subset("eval_nodes", eval_nodes, data.num_nodes, _checks.generator(seed, 1))
    num_test = len(data.dataset.test_labels)
    examples = _subset("eval_examples", eval_examples, num_test, _checks.generator(seed, 2))
    return Plan(batch_size, per_epoch, evaluated, nodes, examples)


def _evaluated_rounds(epochs: int | None, rounds: int | None, eval_every: int, per_epoch: int) -> list[int]:
    """The rounds after which models are evaluated: 0, every `eval_every`, and the last."""
    if epochs is not None and rounds is not None:
        raise ValueError(f"epochs={epochs} and rounds={rounds} exclude each other: give one")
    if rounds is not None:
        total, unit = _checks.integer("rounds", rounds, 0), 1
    else:
        total, unit = _checks.integer("epochs", 10 if epochs is None else epochs, 0), per_epoch
    interval = _checks.integer("eval_every", eval_every, 1)
    return [*range(0, total * unit, interval * unit), total * unit]


def _subset(name: str, count: int | None, available: int, rng: np.random.Generator) -> np.ndarray:
    """All, or that many at random, of 0 .. available - 1; in order."""
    if count is None:
        return np.arange(available)
    return np.sort(rng.choice(available, _checks.integer(name, count, 1, available), replace=False))
