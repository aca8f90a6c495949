"""The states of runs: how they begin, how they are stored on devices, and back."""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcliques_jax._engine import cache_key
from dcliques_jax._engine.fit import as_arrays, check_state, shapes
from dcliques_jax._engine.layout import Layout, stack_runs
from dcliques_jax._engine.plan import Plan, Recipe, Run
from dcliques_jax._engine.program import Carry, Data, shuffled
from dcliques_jax._mesh import guards, transfer
from dcliques_jax.algorithms import Network
from dcliques_jax.results import State, named_leaves

Params = Any


def start(layout: Layout, networks: list[Network]) -> list[State]:
    """The states before the first round in the topology's order, without the axis of runs.

    Those of a mesh are made in the memory of the host, which is larger than that of a device.
    """
    recipe, runs = layout.recipe, layout.runs
    on_host = jax.default_device(jax.local_devices(backend="cpu")[0]) if layout.mesh else contextlib.nullcontext()
    with on_host:
        if isinstance(recipe.init, State):
            states = _continued(runs, recipe, networks)
        else:
            states = [_start(run, recipe, network) for run, network in zip(runs, networks, strict=True)]
        if layout.mesh is not None:
            guards.check_separate(recipe.algorithm.step, states[0].params, states[0].algorithm)
        return states


def _start(run: Run, recipe: Recipe, network: Network) -> State:
    init_key, key = jax.random.split(jax.random.key(run.seed, impl="threefry2x32"))
    num_nodes = run.data.num_nodes
    if isinstance(recipe.init, str):
        example = run.data.dataset.train_inputs[:1]
        options: dict[str, Any] = {"kind": recipe.init, "num_nodes": num_nodes}
        lowered = cache_key.lower(random_params, recipe.model.init, init_key, example, **options)
        params = lowered.compile()(init_key, example)
    else:
        one_node = jax.eval_shape(recipe.model.init, init_key, run.data.dataset.train_inputs[:1])
        params = jax.tree.map(jnp.asarray, recipe.init)
        if shapes(params) == shapes(one_node):
            params = broadcast_to_nodes(params, num_nodes)
    algorithm = as_arrays(recipe.algorithm.init(params, network))
    check_state(algorithm, num_nodes)  # of one that could not be traced before
    return State(params, algorithm, jnp.zeros((), jnp.int32), np.asarray(jax.random.key_data(key)))


def random_params(init: Any, key: jax.Array, example: jax.Array, *, kind: str, num_nodes: int) -> Params:
    """The initial parameters of all nodes of a run, `[nodes, ...]`; see `dcliques_jax.simulate`."""
    if kind == "shared":
        return broadcast_to_nodes(init(key, example), num_nodes)
    params = jax.vmap(init, in_axes=(0, None))(jax.random.split(key, num_nodes), example)
    if kind == "independent":
        return params
    return broadcast_to_nodes(jax.tree.map(lambda leaf: leaf.mean(axis=0), params), num_nodes)


def broadcast_to_nodes(params: Params, num_nodes: int) -> Params:
    """The same parameters for every node."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_nodes, *jnp.shape(leaf))), params)


def _continued(runs: list[Run], recipe: Recipe, networks: list[Network]) -> list[State]:
    """The states that `init` holds, one for each run."""
    given: State = recipe.init
    several = np.ndim(given.round) == 1

    def of_run(number: int, run: Run, network: Network) -> State:
        mine = jax.tree.map(lambda leaf: leaf[number] if several else leaf, given)
        inputs = run.data.dataset.train_inputs[:1]
        one_node = jax.eval_shape(recipe.model.init, jax.random.key(0), inputs)
        stacked = jax.eval_shape(lambda params: broadcast_to_nodes(params, run.data.num_nodes), one_node)
        params = _like(stacked, mine.params, "params")
        expected = jax.eval_shape(lambda params: as_arrays(recipe.algorithm.init(params, network)), params)
        algorithm = _like(expected, mine.algorithm, "algorithm")
        return State(params, algorithm, jnp.asarray(mine.round, jnp.int32), np.asarray(mine.key, np.uint32))

    return [of_run(number, *each) for number, each in enumerate(zip(runs, networks, strict=True))]


def _like(expected: Any, given: Any, name: str) -> Any:
    """The arrays of a pytree in the structure of another with leaves of the same names; a copy."""
    found, wanted = named_leaves(name, given), jax.tree_util.tree_leaves_with_path(expected)
    names = ["/".join([name, *(jax.tree_util.keystr((p,), simple=True) for p in path)]) for path, _ in wanted]
    leaves = []
    for place, (_, leaf) in zip(names, wanted, strict=True):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = found.pop(place, None)
        shape = None if array is None else array.shape[: array.ndim - is_key]
        if array is None or shape != leaf.shape:
            raise ValueError(
                f"init has {place} of shape {shape}, but this run needs {leaf.shape}: continue a state with as many "
                "nodes, and with the model and algorithm that it comes from"
            )
        value = jnp.array(array)
        leaves.append(jax.random.wrap_key_data(value) if is_key else value.astype(leaf.dtype))
    if found:
        raise ValueError(f"init has {next(iter(found))}, which this model and algorithm do not have: pass those of it")
    return jax.tree.unflatten(jax.tree.structure(expected), leaves)


def reordered(state: State, order: np.ndarray) -> State:
    """The state of one run with node `order[k]` in slot k; -1 leaves a slot empty, whatever it holds."""
    params, algorithm = jax.tree.map(lambda leaf: leaf[order] if np.ndim(leaf) else leaf, state[:2])
    return state._replace(params=params, algorithm=algorithm)


def store(layout: Layout, plan: Plan, states: list[State], data: Data) -> Carry:
    """States in the topology's order, as they are stored on devices. The list is emptied: it is as large as they."""
    mesh, epoch, step = layout.mesh, *divmod(int(states[0].round), plan.rounds_per_epoch)
    orders = np.zeros((len(states), layout.num_slots, plan.width), np.int32)  # drawn in the first round of an epoch
    if step:
        draw = jax.jit(shuffled)
        for run in range(len(states)):
            orders[run] = draw(jax.tree.map(lambda leaf, run=run: leaf[run], data), epoch)
    moved = [reordered(states.pop(0), placement.order) for placement in layout.placements]
    carries = [Carry(s.params, s.algorithm, order, s.round) for s, order in zip(moved, orders, strict=True)]
    if mesh is not None:
        together = stack_runs(carries, np)
        return transfer.put(together, transfer.specs(together), mesh)
    # The program takes over the carry's buffers, of which none may be the caller's. Stacking copies; reordered
    # parameters, the largest part, are copies already.
    if len(carries) > 1:
        return stack_runs(carries)
    (only,) = carries
    return Carry(_lifted(only.params), *stack_runs([only[1:]]))


@functools.partial(jax.jit, donate_argnums=0)
def _lifted(params: Any) -> Any:
    """The parameters of a single run with an axis of runs, in the same memory."""
    return jax.tree.map(lambda leaf: leaf[None], params)


def in_topology_order(layout: Layout, carry: Carry, keys: np.ndarray) -> State:
    """A stored carry in the topology's order, with the axis of runs; on the host, where there is room for a copy."""
    params, algorithm, number = jax.tree.map(transfer.fetched, (carry.params, carry.algorithm, carry.round))
    on_host = State(params, algorithm, number, keys)
    runs = [jax.tree.map(lambda leaf, run=run: leaf[run], on_host) for run in range(len(layout.runs))]
    together: State = stack_runs([reordered(run, p.slots) for run, p in zip(runs, layout.placements, strict=True)], np)
    return together
