"""The compiled rounds.

Several runs may be simulated together: arrays that differ between runs have the runs on their first axis. Within a run,
nodes are stored in slots, in the order `Data.nodes`. On a mesh each device runs the same program on its slots and
communicates with other devices only through `Weights`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dcliques_jax import mixing
from dcliques_jax._engine import outages, sampling
from dcliques_jax._engine.chunks import over_nodes
from dcliques_jax._mesh import transfer
from dcliques_jax.algorithms import Network, Round

Params = Any

REPLICATED = PartitionSpec()  # the same on all devices
IN_PARTS = PartitionSpec(None, transfer.AXIS)  # [runs, slots, ...]
_MEASURED = PartitionSpec(None, None, transfer.AXIS)  # [runs, rounds, slots]
_STEPS = 2**32 - 1  # folded into the key of a run for draws of steps; no epoch, also folded in, gets as large
# Folded into the key of a round, for draws other than those of steps.
_DRAWS = {"augment": 2**32 - 4, "model": 2**32 - 5}


class Program(NamedTuple):
    """The static parts of rounds, besides the shapes of their arguments."""

    apply: Any  # (params, state, inputs, *, train, key) -> (outputs, state), for one node
    loss_fn: Any  # (outputs, labels) -> losses, for one batch
    make_step: Any  # values of a sweep -> `Algorithm.step`, for all nodes
    batch_size: int
    rounds_per_epoch: int
    faults: outages.Faults | None = None  # None: nothing fails
    augment: Any = None  # (key, inputs) -> inputs, for one batch; None: inputs stay as they are
    draws: frozenset[str] = frozenset()  # what draws random numbers at every node, of "augment" and "model"
    gossip_state: bool = False  # whether the state of models is mixed
    sampling: str = "epochs"  # how nodes take batches, see `PartitionedDataset.sampled`


class Examples(NamedTuple):
    """Training examples, shared by all runs. On a mesh each device holds equally many of its own."""

    inputs: Any  # [train, ...] as bytes if the data set has them
    byte_scale: tuple[Any, Any] | None  # (scale, shift) of the bytes, numbers or arrays
    labels: Any  # [train]


class Data(NamedTuple):
    """The constant data of all rounds of a run."""

    examples: Any  # [runs, slots, width] the training examples of the node in each slot
    sizes: Any  # [runs, slots] number of these examples; 0 in an empty slot
    nodes: Any  # [runs, slots] the node in each slot, -1 in an empty slot
    bounds: Any  # [runs, slots, rounds per epoch + 1] bounds of its batches
    key: Any  # [runs, 2] the data of a threefry key
    width: Any  # [runs] length of the longest list of examples of a run; None if equal for all runs
    values: Any  # the arguments of the algorithm in a sweep by name, [runs]


def data_specs(data: Data) -> Any:
    """Returns the sharding of the data on a mesh."""
    width = None if data.width is None else REPLICATED
    return Data(IN_PARTS, IN_PARTS, IN_PARTS, IN_PARTS, REPLICATED, width, dict.fromkeys(data.values, REPLICATED))


class Carry(NamedTuple):
    """The state that a round passes to the next."""

    params: Params  # [runs, slots, ...] in every leaf
    algorithm: Any  # [runs, slots, ...] or [runs] in every leaf
    order: Any  # [runs, slots, ..] order of each node's examples in this epoch
    round: jax.Array  # [runs] number of rounds so far, equal for all runs
    faults: Any  # `outages.FaultState`, with the runs on the first axis; None without faults
    model: Any  # [runs, slots, ...] in every leaf, the state of models; no leaves if they have none


def carry_specs(carry: Carry) -> Any:
    """Returns the sharding of a carry on a mesh: by slots, but for scalars and the faults of nodes."""
    specs = transfer.specs(carry)
    if carry.faults is None:
        return specs
    nodes = jax.tree.map(lambda _: REPLICATED, carry.faults.nodes)
    return specs._replace(faults=specs.faults._replace(nodes=nodes))


def over_runs(function: Callable[..., Any], lift: Callable[..., Any] = jax.vmap) -> Callable[..., Any]:
    """Lifts a function over runs with `jax.vmap` or `in_turn`. A single run is computed without the axis."""

    def lifted(*args: Any) -> Any:
        if len(jax.tree.leaves(args)[0]) > 1:
            return lift(function)(*args)
        return jax.tree.map(lambda leaf: leaf[None], function(*jax.tree.map(lambda leaf: leaf[0], args)))

    return lifted


def in_turn(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lifts a function over runs that are computed one after another, for work that fills a device by itself."""
    return lambda *args: jax.lax.map(lambda of_run: function(*of_run), args)


def on_devices(function: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Runs a function of one device's data on all devices of a mesh; without a mesh returns the function itself."""
    if mesh is None:
        return function
    # `check_vma` would need carries of loops to mark values that differ between devices; nothing here uses it.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def replicated(tree: Any, mesh: Mesh | None) -> Any:
    """Replicates small arrays on all devices, so that every process can read them."""
    return tree if mesh is None else jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, REPLICATED))


def run(
    program: Program,
    carry: Carry,
    network: Network,
    data: Data,
    examples: Examples,
    num_rounds: Any,
    *,
    most_rounds: int,
    mesh: Mesh | None,
) -> tuple[Carry, tuple[jax.Array, ...]]:
    """Runs `num_rounds` rounds; returns the carry and what `Tally` adds up, `[runs, most_rounds, slots]`, then 0.

    `num_rounds` is traced: XLA would unroll a constant loop of one round and round differently in it.
    """

    def all_runs(carry: Carry, network: Network, data: Data, examples: Examples, start: Any, num_rounds: Any) -> Any:
        def of_run(carry: Carry, network: Network, data: Data) -> Any:
            losses = jnp.zeros((most_rounds, len(data.nodes)))
            counts = (losses.astype(jnp.int32),) * num_counts
            one_round = _one_round(program, network, data, examples, start, runs)
            return jax.lax.fori_loop(0, num_rounds, one_round, (carry, (losses, *counts)))

        runs = len(carry.round)
        return over_runs(of_run)(carry, network, data)

    start = carry.round[0]  # shared by all runs, so that `vmap` keeps the condition on it
    num_counts = 1 if program.faults is None else 1 + 2 * len(network) + 1
    in_parts = carry_specs(carry)
    train = PartitionSpec(transfer.AXIS)
    in_specs = (
        in_parts,
        jax.tree.map(lambda _: IN_PARTS, network),
        data_specs(data),
        Examples(train, jax.tree.map(lambda _: REPLICATED, examples.byte_scale), train),
        REPLICATED,
        REPLICATED,
    )
    lifted = on_devices(all_runs, mesh, in_specs, (in_parts, (_MEASURED,) * (1 + num_counts)))
    carry, measured = lifted(carry, network, data, examples, start, num_rounds)
    return carry, replicated(measured, mesh)


def _one_round(program: Program, network: Network, data: Data, examples: Examples, start: jax.Array, runs: int) -> Any:
    """Returns one round of one run, as the body of a loop over the rounds after `start`."""

    def loss(params: Params, state: Any, inputs: jax.Array, labels: jax.Array, taken: jax.Array, keys: Any) -> Any:
        outputs, state = program.apply(params, state, inputs, train=True, key=keys.get("model"))
        losses = program.loss_fn(outputs, labels)
        taken = taken if losses.ndim == 1 else taken[:, None] & (labels >= 0)  # without the padding of sequences
        return jnp.sum(jnp.where(taken, losses, 0)) / jnp.maximum(taken.sum(), 1), state

    def loss_and_gradient(params: Params, state: Any, chosen: jax.Array, taken: jax.Array, keys: Any) -> Any:
        inputs, labels = _taken(examples, chosen)
        if program.augment is not None:
            inputs = program.augment(keys["augment"], inputs)
        return jax.value_and_grad(loss, has_aux=True)(params, state, inputs, labels, taken, keys)

    key = jax.random.wrap_key_data(data.key, impl="threefry2x32")
    step, draws = program.make_step(**data.values), sorted(program.draws)

    def one_round(index: jax.Array, before: Any) -> Any:
        carry, measured = before
        number = start + index
        epoch, step_in_epoch = jnp.divmod(number, program.rounds_per_epoch)
        drawn = functools.partial(draw_order, program.sampling, carry.order.shape[1], data)
        order = jax.lax.cond(step_in_epoch == 0, lambda: drawn(epoch), lambda: carry.order)
        batch = sampling.batches(data.examples, order, data.bounds, step_in_epoch, program.batch_size)
        round = Round(
            number,
            jax.random.fold_in(jax.random.fold_in(key, _STEPS), number),
            data.nodes,
            lambda params: over_nodes(loss_and_gradient, runs)(params, carry.model, *batch, keys)[1],
        )
        keys = {name: round._replace(key=jax.random.fold_in(round.key, _DRAWS[name])).node_keys() for name in draws}
        (loss, model), gradients = over_nodes(loss_and_gradient, runs)(carry.params, carry.model, *batch, keys)
        taken = outages.take(program.faults, carry.faults, network, round, key)
        stepped = step(carry.params, gradients, carry.algorithm, taken.network, round)
        model = mixing.mix(taken.network.gossip, model) if program.gossip_state else model
        params, algorithm, model = taken.frozen((*stepped, model), (carry.params, carry.algorithm, carry.model))
        sizes = taken.frozen(batch[1].sum(axis=1, dtype=jnp.int32), 0)
        measured = tuple(
            jax.lax.dynamic_update_index_in_dim(all_rounds, values.astype(all_rounds.dtype), index, 0)
            for all_rounds, values in zip(measured, (loss, sizes, *taken.counted), strict=True)
        )
        return Carry(params, algorithm, order, carry.round + 1, taken.state, model), measured

    return one_round


def draw_order(how: str, width: int, data: Data, epoch: Any) -> jax.Array:
    """Returns the order of the examples of each node of one run in an epoch, `[slots, width]`."""
    draw = sampling.draw_with_replacement if how == "with_replacement" else sampling.shuffle
    key = jax.random.wrap_key_data(data.key, impl="threefry2x32")
    return draw(key, epoch, width, data.sizes, data.nodes, data.width)


def _taken(examples: Examples, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns inputs and labels of some training examples, as the model takes them."""
    inputs, labels = (array.at[chosen].get(mode="promise_in_bounds") for array in (examples.inputs, examples.labels))
    if examples.byte_scale is not None:
        scale, shift = (jnp.asarray(value, jnp.float32) for value in examples.byte_scale)
        inputs = inputs.astype(jnp.float32) * scale + shift
    return inputs, labels
