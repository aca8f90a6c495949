"""The compiled programs: initial models, the rounds between two evaluations, and an evaluation.

Several runs may be simulated at once: all that differs between them has the runs on its first axis. Inside a run, nodes
are stored in the order `Data.nodes`. On a mesh every device has its part of the places, runs the same program on it and
talks to others only where `Weights` do, and for the consensus distance.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dcliques_jax import _devices, metrics, sampling
from dcliques_jax._chunks import over_nodes
from dcliques_jax.algorithms import Algorithm

Params = Any

_ALL = PartitionSpec()  # the same on all devices
_MEASURED = PartitionSpec(None, None, _devices.AXIS)  # [runs, rounds, places]


class Program(NamedTuple):
    """What rounds depend on besides the shapes of their arguments."""

    apply: Any  # (params, inputs) -> logits, for one node
    loss_fn: Any  # (logits, labels) -> losses, for one batch
    step: Any  # (params, gradients, state) -> (params, state), for all nodes
    batch_size: int
    rounds_per_epoch: int


class Examples(NamedTuple):
    """Training examples, the same for all runs; on a mesh those of each device in turn, as many for each."""

    inputs: Any  # [train, ...] as bytes where the data set knows them
    byte_scale: tuple[Any, Any] | None  # (scale, shift) of the bytes, numbers or arrays
    labels: Any  # [train]


class Data(NamedTuple):
    """What stays the same in all rounds of a run."""

    examples: Any  # [runs, places, most] the training examples of the node at each place
    sizes: Any  # [runs, places] their number; 0 at an empty place
    nodes: Any  # [runs, places] the number of the node, -1 at an empty place
    bounds: Any  # [runs, places, rounds per epoch + 1] where its batches begin and end
    key: Any  # [runs, 2] the data of a threefry key
    width: Any  # [runs] the longest list of examples of a run; None if they are of equal length


def data_specs(data: Data) -> Any:
    """How data lie on a mesh."""
    parts = PartitionSpec(None, _devices.AXIS)
    return Data(parts, parts, parts, parts, key=_ALL, width=None if data.width is None else _ALL)


class SimulationState(NamedTuple):
    """What the next round needs."""

    params: Params  # [runs, places, ...] in every leaf
    algorithm: Any  # [runs, ...]
    order: jax.Array  # [runs, places, most] in which each node goes through its examples in this epoch
    round: jax.Array  # [runs] rounds run so far, the same for all

    def reordered(self, algorithm: Algorithm, order: np.ndarray) -> "SimulationState":
        """The state of one run, without the axis of runs, with node `order[k]` at place k; -1 leaves a place empty."""
        return SimulationState(
            params=jax.tree.map(lambda leaf: leaf[order], self.params),
            algorithm=self.algorithm if algorithm.reorder is None else algorithm.reorder(self.algorithm, order),
            order=self.order[order],
            round=self.round,
        )


class Evaluation(NamedTuple):
    """What is measured after a round."""

    correct: Any  # [runs, evaluated places] examples on which a model is right
    loss: Any  # [runs, evaluated places]
    consensus_distance: Any  # [runs]
    mean_model_correct: Any  # [runs] examples on which the mean of all models is right
    nodes_right: Any  # [runs, chunks, chunk] how many of the evaluated nodes are right on each example
    finite: Any  # [runs, places] whether all parameters of a node are finite


def over_runs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.vmap` over runs. The program of a single run is spared the axis."""

    def lifted(*args: Any) -> Any:
        if len(jax.tree.leaves(args)[0]) > 1:
            return jax.vmap(function)(*args)
        return jax.tree.map(lambda leaf: leaf[None], function(*jax.tree.map(lambda leaf: leaf[0], args)))

    return lifted


def on_devices(function: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """A function of what a device holds, run by all devices of a mesh; without a mesh the function itself."""
    if mesh is None:
        return function
    # Values that differ between devices are not told from others in the carries of loops: nothing here needs it.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def run(
    program: Program,
    state: SimulationState,
    data: Data,
    examples: Examples,
    num_rounds: Any,
    *,
    most_rounds: int,
    mesh: Mesh | None,
) -> tuple[SimulationState, tuple[jax.Array, jax.Array]]:
    """Runs some rounds; returns the state, and losses and batch sizes `[runs, most_rounds, places]`, 0 after the last.

    How many is no constant: XLA would take the loop of a single round apart and round differently in it.
    """
    apply, loss_fn, step, batch_size, per_epoch = program

    def loss(params: Params, inputs: jax.Array, labels: jax.Array, taken: jax.Array) -> jax.Array:
        losses = loss_fn(apply(params, inputs), labels)
        return jnp.sum(jnp.where(taken, losses, 0)) / jnp.maximum(taken.sum(), 1)

    def rounds(examples: Examples, start: jax.Array, num_rounds: jax.Array, state: SimulationState, data: Data) -> Any:
        def loss_and_gradient(params: Params, chosen: jax.Array, taken: jax.Array) -> tuple[jax.Array, Params]:
            return jax.value_and_grad(loss)(params, *_taken(examples, chosen), taken)

        def shuffled(epoch: jax.Array) -> jax.Array:
            key = jax.random.wrap_key_data(data.key, impl="threefry2x32")
            return sampling.shuffle(key, epoch, data.examples.shape[1], data.sizes, data.nodes, data.width)

        def one_round(index: jax.Array, carry: Any) -> Any:
            state, losses, counts = carry
            epoch, turn = jnp.divmod(start + index, per_epoch)
            order = jax.lax.cond(turn == 0, lambda: shuffled(epoch), lambda: state.order)
            chosen, taken = sampling.batches(data.examples, order, data.bounds, turn, batch_size)
            loss, gradients = over_nodes(loss_and_gradient)(state.params, chosen, taken)
            params, algorithm = step(state.params, gradients, state.algorithm)
            if mesh is not None:
                _devices.check_constant_weights(state.algorithm, algorithm)
            losses = jax.lax.dynamic_update_index_in_dim(losses, loss.astype(losses.dtype), index, 0)
            counts = jax.lax.dynamic_update_index_in_dim(counts, taken.sum(axis=1, dtype=jnp.int32), index, 0)
            return SimulationState(params, algorithm, order, state.round + 1), losses, counts

        blank = jnp.zeros((most_rounds, len(data.nodes)))
        carry = (state, blank, blank.astype(jnp.int32))
        state, losses, counts = jax.lax.fori_loop(0, num_rounds, one_round, carry)
        return state, (losses, counts)

    def all_runs(state: SimulationState, data: Data, examples: Examples, start: jax.Array, num_rounds: Any) -> Any:
        return over_runs(functools.partial(rounds, examples, start, num_rounds))(state, data)

    start = state.round[0]  # not one for each run: a condition on it stays a condition under `vmap`
    places = data.nodes.shape[1]
    in_parts = _devices.specs(state, places)
    train = PartitionSpec(_devices.AXIS)
    in_specs = (
        in_parts,
        data_specs(data),
        Examples(train, jax.tree.map(lambda _: _ALL, examples.byte_scale), train),
        _ALL,
        _ALL,
    )
    out_specs = (in_parts, (_MEASURED, _MEASURED))
    state, measured = on_devices(all_runs, mesh, in_specs, out_specs)(state, data, examples, start, num_rounds)
    return state, everywhere(measured, mesh)


def _taken(examples: Examples, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inputs and labels of some training examples, as the model sees them."""
    inputs, labels = (array.at[chosen].get(mode="promise_in_bounds") for array in (examples.inputs, examples.labels))
    if examples.byte_scale is not None:
        scale, shift = (jnp.asarray(value, jnp.float32) for value in examples.byte_scale)
        inputs = inputs.astype(jnp.float32) * scale + shift
    return inputs, labels


def everywhere(tree: Any, mesh: Mesh | None) -> Any:
    """Small arrays, handed to all devices, so that every process can read them."""
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, _ALL))


def evaluate(
    functions: tuple[Any, Any],
    params: Params,
    nodes: jax.Array,
    evaluated: jax.Array | None,
    chunks: jax.Array,
    inputs: jax.Array,
    labels: jax.Array,
    *,
    mesh: Mesh | None,
) -> Evaluation:
    """Evaluates all places, or those `evaluated` `[runs, ..]` of each device, on the examples `chunks` of each run.

    `evaluated` is -1 where a device has fewer than others. `functions` are a model's `apply` and the loss, `nodes`
    those of `Data`; see `metrics.evaluate`.
    """
    apply, loss_fn = functions

    def all_runs(params: Params, nodes: Any, evaluated: Any, chunks: jax.Array, inputs: Any, labels: Any) -> Evaluation:
        def one_run(params: Params, nodes: jax.Array, evaluated: jax.Array | None, chunks: jax.Array) -> Evaluation:
            def of_node(params: Params) -> tuple[jax.Array, jax.Array, jax.Array]:
                return metrics.evaluate(apply, params, inputs, labels, chunks, loss_fn=loss_fn)

            chosen = params if evaluated is None else jax.tree.map(lambda leaf: leaf[evaluated], params)
            correct, loss, right = over_nodes(of_node)(chosen)
            used = nodes >= 0
            counted = used if evaluated is None else evaluated >= 0
            nodes_right = jnp.where(counted[:, None, None], right, False).sum(axis=0)
            # Without a mesh no place is empty, and a run is spared what that would cost.
            if mesh is None:
                distance = metrics.consensus_distance(params)
                mean_model = jax.tree.map(lambda leaf: leaf.mean(axis=0), params)
            else:
                distance = _devices.consensus_distance(params, used)
                mean_model = _devices.mean_model(params, used)
                nodes_right = jax.lax.psum(nodes_right, _devices.AXIS)
            finite = metrics.finite_nodes(params)
            return Evaluation(correct, loss, distance, of_node(mean_model)[0], nodes_right, finite)

        return over_runs(one_run)(params, nodes, evaluated, chunks)

    places = nodes.shape[1]
    in_parts = PartitionSpec(None, _devices.AXIS)
    in_specs = (_devices.specs(params, places), in_parts, in_parts, _ALL, _ALL, _ALL)
    out_specs = Evaluation(in_parts, in_parts, _ALL, _ALL, _ALL, in_parts)
    lifted = on_devices(all_runs, mesh, in_specs, out_specs)
    return everywhere(lifted(params, nodes, evaluated, chunks, inputs, labels), mesh)


def random_params(init: Any, key: jax.Array, example: jax.Array, *, kind: str, num_nodes: int) -> Params:
    """The initial parameters of all nodes of a run, `[nodes, ...]`; see `dcliques_jax.simulate`."""
    if kind == "shared":
        return stacked(init(key, example), num_nodes)
    params = jax.vmap(init, in_axes=(0, None))(jax.random.split(key, num_nodes), example)
    if kind == "independent":
        return params
    return stacked(jax.tree.map(lambda leaf: leaf.mean(axis=0), params), num_nodes)


def stacked(params: Params, num_nodes: int) -> Params:
    """The same parameters for every node."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_nodes, *jnp.shape(leaf))), params)
