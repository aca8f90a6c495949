"""The compiled programs: initial models, the rounds between two evaluations, and an evaluation.

Several runs may be simulated at once: all that differs between them has the runs on its first axis. Inside a run, nodes
are stored in the order `Data.order`; whatever leaves a program besides its state is in the topology's order.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcliques_jax import metrics, sampling
from dcliques_jax._chunks import over_nodes
from dcliques_jax._static import Static
from dcliques_jax.algorithms import Algorithm

Params = Any


class Program(NamedTuple):
    """What rounds depend on besides the shapes of their arguments."""

    apply: Any  # (params, inputs) -> logits, for one node
    loss_fn: Any  # (logits, labels) -> losses, for one batch
    step: Any  # (params, gradients, state) -> (params, state), for all nodes
    batch_size: int
    rounds_per_epoch: int


class Examples(NamedTuple):
    """Training examples, the same for all runs."""

    inputs: jax.Array  # [train, ...] as bytes where the data set knows them
    byte_scale: tuple[float, float] | None  # (scale, shift) of the bytes
    labels: jax.Array  # [train]


class Data(NamedTuple):
    """What stays the same in all rounds of a run."""

    examples: jax.Array  # [runs, nodes, most] the training examples of each node
    sizes: jax.Array  # [runs, nodes]
    order: jax.Array  # [runs, nodes] the node that is stored at each place
    bounds: jax.Array  # [runs, places, rounds per epoch + 1] where the batches of the node at each place begin and end
    key: jax.Array  # [runs]


class SimulationState(NamedTuple):
    """What the next round needs."""

    params: Params  # [runs, nodes, ...] in every leaf
    algorithm: Any  # [runs, ...]
    shuffled: jax.Array  # [runs, nodes, most] the examples of each node in the order of this epoch
    round: jax.Array  # [runs] rounds run so far, the same for all

    def reordered(self, algorithm: Algorithm, order: np.ndarray) -> "SimulationState":
        """The state of one run, without the axis of runs, with node `order[k]` at place k."""
        return SimulationState(
            params=jax.tree.map(lambda leaf: leaf[order], self.params),
            algorithm=self.algorithm if algorithm.reorder is None else algorithm.reorder(self.algorithm, order),
            shuffled=self.shuffled[order],
            round=self.round,
        )


class Evaluation(NamedTuple):
    """What is measured after a round."""

    accuracy: Any  # [runs, eval_nodes]
    loss: Any  # [runs, eval_nodes]
    consensus_distance: Any  # [runs]
    finite: Any  # [runs, nodes] whether all parameters of a node are finite


def over_runs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.vmap` over runs. The program of a single run is spared the axis."""

    def lifted(*args: Any) -> Any:
        if len(jax.tree.leaves(args)[0]) > 1:
            return jax.vmap(function)(*args)
        return jax.tree.map(lambda leaf: leaf[None], function(*jax.tree.map(lambda leaf: leaf[0], args)))

    return lifted


@functools.partial(jax.jit, static_argnames=("program", "most_rounds"), donate_argnames="state")
def run(
    program: Static[Program],
    state: SimulationState,
    data: Data,
    examples: Examples,
    num_rounds: int,
    *,
    most_rounds: int,
) -> tuple[SimulationState, tuple[jax.Array, jax.Array]]:
    """Runs some rounds; returns the state, and losses and batch sizes `[runs, most_rounds, nodes]`, 0 after the last.

    How many is no constant: XLA would take the loop of a single round apart and round differently in it.
    """
    apply, loss_fn, step, batch_size, per_epoch = program.value

    def loss(params: Params, inputs: jax.Array, labels: jax.Array, taken: jax.Array) -> jax.Array:
        losses = loss_fn(apply(params, inputs), labels)
        return jnp.sum(jnp.where(taken, losses, 0)) / jnp.maximum(taken.sum(), 1)

    def loss_and_gradient(params: Params, chosen: jax.Array, taken: jax.Array) -> tuple[jax.Array, Params]:
        return jax.value_and_grad(loss)(params, *_taken(examples, chosen), taken)

    start = state.round[0]  # not one for each run: a condition on it stays a condition under `vmap`

    def rounds(state: SimulationState, data: Data) -> Any:
        def one_round(index: jax.Array, carry: Any) -> Any:
            state, losses, counts = carry
            epoch, turn = jnp.divmod(start + index, per_epoch)
            shuffled = jax.lax.cond(
                turn == 0,
                lambda: sampling.shuffle(data.key, epoch, data.examples, data.sizes)[data.order],
                lambda: state.shuffled,
            )
            chosen, taken = sampling.batches(shuffled, data.bounds, turn, batch_size)
            loss, gradients = over_nodes(loss_and_gradient)(state.params, chosen, taken)
            params, algorithm = step(state.params, gradients, state.algorithm)
            losses = jax.lax.dynamic_update_index_in_dim(losses, loss.astype(losses.dtype), index, 0)
            counts = jax.lax.dynamic_update_index_in_dim(counts, taken.sum(axis=1, dtype=jnp.int32), index, 0)
            return SimulationState(params, algorithm, shuffled, state.round + 1), losses, counts

        blank = jnp.zeros((most_rounds, len(data.order)))
        carry = (state, blank, blank.astype(jnp.int32))
        state, losses, counts = jax.lax.fori_loop(0, num_rounds, one_round, carry)
        places = jnp.argsort(data.order)
        return state, (losses[:, places], counts[:, places])

    return over_runs(rounds)(state, data)


def _taken(examples: Examples, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Inputs and labels of some training examples, as the model sees them."""
    inputs, labels = (array.at[chosen].get(mode="promise_in_bounds") for array in (examples.inputs, examples.labels))
    if examples.byte_scale is not None:
        scale, shift = (jnp.asarray(value, jnp.float32) for value in examples.byte_scale)
        inputs = inputs.astype(jnp.float32) * scale + shift
    return inputs, labels


@functools.partial(jax.jit, static_argnames=("apply", "loss_fn"))
def evaluate(
    apply: Static[Any],
    loss_fn: Static[Any],
    params: Params,
    order: jax.Array,
    nodes: jax.Array | None,
    chunks: jax.Array,
    inputs: jax.Array,
    labels: jax.Array,
) -> Evaluation:
    """Evaluates some nodes, or all of them, on the examples `chunks` of each run; see `metrics.evaluate`."""

    def one_run(params: Params, order: jax.Array, nodes: jax.Array | None, chunks: jax.Array) -> Evaluation:
        def of_node(params: Params) -> tuple[jax.Array, jax.Array]:
            return metrics.evaluate(apply.value, params, inputs, labels, chunks, loss_fn=loss_fn.value)

        places = jnp.argsort(order)
        if nodes is None:
            accuracy, loss = (values[places] for values in over_nodes(of_node)(params))
        else:
            accuracy, loss = over_nodes(of_node)(jax.tree.map(lambda leaf: leaf[places[nodes]], params))
        return Evaluation(accuracy, loss, metrics.consensus_distance(params), metrics.finite_nodes(params)[places])

    return over_runs(one_run)(params, order, nodes, chunks)


@functools.partial(jax.jit, static_argnames=("init", "kind", "num_nodes"))
def random_params(init: Static[Any], kind: str, num_nodes: int, key: jax.Array, example: jax.Array) -> Params:
    """The initial parameters of all nodes of a run, `[nodes, ...]`; see `dcliques_jax.simulate`."""
    if kind == "shared":
        return stacked(init.value(key, example), num_nodes)
    params = jax.vmap(init.value, in_axes=(0, None))(jax.random.split(key, num_nodes), example)
    if kind == "independent":
        return params
    return stacked(jax.tree.map(lambda leaf: leaf.mean(axis=0), params), num_nodes)


def stacked(params: Params, num_nodes: int) -> Params:
    """The same parameters for every node."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_nodes, *jnp.shape(leaf))), params)
