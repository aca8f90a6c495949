"""The states of runs: makes initial states, stores them on devices and fetches them."""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dcliques_jax._engine import cache_key, outages
from dcliques_jax._engine.fit import as_arrays, check_state, shapes
from dcliques_jax._engine.layout import Layout, stack_runs
from dcliques_jax._engine.plan import Plan, Recipe, Run
from dcliques_jax._engine.program import Carry, Data, carry_specs, draw_order
from dcliques_jax._mesh import guards, transfer
from dcliques_jax._store.arrays_by_name import named_leaves, names_of
from dcliques_jax.algorithms import Algorithm, Network
from dcliques_jax.results import State

Params = Any


def start(layout: Layout, networks: list[Network]) -> list[State]:
    """Returns the initial states in the topology's order, without the axis of runs.

    For a mesh they are made on the host, which has more memory than a device.
    """
    recipe, runs = layout.recipe, layout.runs
    on_host = jax.default_device(jax.local_devices(backend="cpu")[0]) if layout.mesh else contextlib.nullcontext()
    with on_host:
        if isinstance(recipe.init, State):
            states = _continued(runs, recipe, networks)
        else:
            states = [_start(run, recipe, network) for run, network in zip(runs, networks, strict=True)]
        if layout.mesh is not None:
            guards.check_separate(recipe.algorithm_of(runs[0]).step, states[0].params, states[0].algorithm)
        return states


def _start(run: Run, recipe: Recipe, network: Network) -> State:
    init_key, key = jax.random.split(jax.random.key(run.seed, impl="threefry2x32"))
    num_nodes = run.data.num_nodes
    if isinstance(recipe.init, str):
        example = run.data.dataset.train_inputs[:1]
        options: dict[str, Any] = {"kind": recipe.init, "num_nodes": num_nodes}
        lowered = cache_key.lower(random_models, recipe.model.init, init_key, example, **options)
        params, model = lowered.compile()(init_key, example)
    else:
        one_node, model = recipe.model.init(init_key, jnp.asarray(run.data.dataset.train_inputs[:1]))
        model = broadcast_to_nodes(model, num_nodes)
        params = jax.tree.map(jnp.asarray, recipe.init)
        if shapes(params) == shapes(one_node):
            params = broadcast_to_nodes(params, num_nodes)
    algorithm = as_arrays(recipe.algorithm_of(run).init(params, network))
    check_state(algorithm, num_nodes)  # again, for algorithms that could not be traced
    faults = _faults_at_start(run, recipe, network, key)
    return State(params, algorithm, jnp.zeros((), jnp.int32), np.asarray(jax.random.key_data(key)), faults, model)


def _faults_at_start(run: Run, recipe: Recipe, network: Network, key: jax.Array) -> outages.FaultState | None:
    faults = recipe.faults_of(run)
    return None if faults is None else outages.start(faults, network, key)


def random_models(init: Any, key: jax.Array, example: jax.Array, *, kind: str, num_nodes: int) -> tuple[Params, Any]:
    """Draws the initial parameters and states of all models of a run, `[nodes, ...]`; see `dcliques_jax.simulate`."""
    if kind == "shared":
        return broadcast_to_nodes(init(key, example), num_nodes)
    models: tuple[Params, Any] = jax.vmap(init, in_axes=(0, None))(jax.random.split(key, num_nodes), example)
    if kind == "independent":
        return models
    return broadcast_to_nodes(jax.tree.map(lambda leaf: leaf.mean(axis=0).astype(leaf.dtype), models), num_nodes)


def broadcast_to_nodes(tree: Any, num_nodes: int) -> Any:
    """Repeats the arrays of one node for all nodes."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_nodes, *jnp.shape(leaf))), tree)


def _continued(runs: list[Run], recipe: Recipe, networks: list[Network]) -> list[State]:
    """Returns the states in `init`, one per run."""
    given: State = recipe.init
    several = np.ndim(given.round) == 1

    def of_run(number: int, run: Run, network: Network) -> State:
        mine = jax.tree.map(lambda leaf: leaf[number] if several else leaf, given)
        inputs = run.data.dataset.train_inputs[:1]
        one_node = jax.eval_shape(recipe.model.init, jax.random.key(0), inputs)
        stacked = jax.eval_shape(lambda models: broadcast_to_nodes(models, run.data.num_nodes), one_node)
        params, model = _like(stacked[0], mine.params, "params"), _like(stacked[1], mine.model, "model")
        algorithm = _like(_shapes_of_state(recipe.algorithm_of(run), params, network), mine.algorithm, "algorithm")
        key = np.asarray(mine.key, np.uint32)
        faults = _faults_at_start(run, recipe, network, jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32"))
        with contextlib.suppress(ValueError):  # other faults start anew
            before = _like(faults, mine.faults, "faults")
            if faults is not None and before.ends == faults.ends:  # and so do the links of another topology
                faults = before
        return State(params, algorithm, jnp.asarray(mine.round, jnp.int32), key, faults, model)

    return [of_run(number, *each) for number, each in enumerate(zip(runs, networks, strict=True))]


def _shapes_of_state(algorithm: Algorithm, params: Params, network: Network) -> Any:
    def init(params: Params) -> Any:
        return as_arrays(algorithm.init(params, network))

    try:
        return jax.eval_shape(init, params)
    except jax.errors.JAXTypeError:  # an algorithm that depends on values
        return init(params)


def _like(expected: Any, given: Any, name: str) -> Any:
    """Copies the arrays of a pytree into the structure of another with leaves of the same names."""
    found, wanted = named_leaves(name, given), jax.tree_util.tree_leaves_with_path(expected)
    leaves = []
    for path, leaf in wanted:
        place = (name, *names_of(path))
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = found.pop(place, None)
        shape = None if array is None else array.shape[: array.ndim - is_key]
        if array is None or shape != leaf.shape:
            raise ValueError(
                f"init has {'/'.join(place)} of shape {shape}, but this run needs {leaf.shape}: continue a state with "
                "its number of nodes, and with the model and algorithm that it comes from"
            )
        value = jnp.array(array)
        if is_key:
            kind = jax.random.key_impl(jnp.empty((), leaf.dtype))  # takes arrays, not shapes
            leaves.append(jax.random.wrap_key_data(value, impl=kind))
        else:
            leaves.append(value.astype(leaf.dtype))
    if found:
        extra = "/".join(next(iter(found)))
        raise ValueError(f"init has {extra}, but this run does not: pass the model and algorithm of init")
    return jax.tree.unflatten(jax.tree.structure(expected), leaves)


def reordered(state: State, order: np.ndarray, of_pairs: Sequence[bool]) -> State:
    """Puts node `order[k]` of the state of one run into slot k. The values of an empty slot, -1, are arbitrary.

    `of_pairs` tells for each matrix of the network whether its links are pairs of nodes, see `outages.have_pairs`.
    """
    rows = (state.params, state.algorithm, state.model)
    params, algorithm, model = jax.tree.map(lambda leaf: leaf[order] if np.ndim(leaf) else leaf, rows)
    faults = state.faults
    if faults is not None:  # those of nodes are kept by number
        links = [
            jax.tree.map(functools.partial(_links_in_order, order=order, of_pairs=pairs), each)
            for each, pairs in zip(faults.links, of_pairs, strict=True)
        ]
        faults = faults._replace(links=tuple(links))
    return state._replace(params=params, algorithm=algorithm, faults=faults, model=model)


def _links_in_order(leaf: Any, *, order: np.ndarray, of_pairs: bool) -> Any:
    """Reorders the state of links. Those of pairs have a column per node, for each gossip of a round."""
    rows = leaf[order]
    if not of_pairs or leaf.shape[1] % len(leaf):
        return rows
    return rows.reshape(len(order), -1, len(order))[..., order].reshape(leaf.shape)


def store(layout: Layout, plan: Plan, states: list[State], data: Data, of_pairs: Sequence[bool]) -> Carry:
    """Stores states, given in the topology's order, on the devices. Empties the list to free memory."""
    mesh, epoch, step = layout.mesh, *divmod(int(states[0].round), plan.rounds_per_epoch)
    shape = (len(states), layout.num_slots, plan.order_width)
    orders = np.zeros(shape, np.int32)  # the first round of an epoch draws them
    if step:
        draw = jax.jit(functools.partial(draw_order, plan.sampling, plan.order_width))
        for run in range(len(states)):
            orders[run] = draw(jax.tree.map(lambda leaf, run=run: leaf[run], data), epoch)
    moved = [reordered(states.pop(0), placement.order, of_pairs) for placement in layout.placements]
    carries = [carry_of(each, order) for each, order in zip(moved, orders, strict=True)]
    if mesh is not None:
        together = stack_runs(carries, np)
        return transfer.put(together, carry_specs(together), mesh)
    # The program donates the carry's buffers, so none may belong to the caller. Stacking copies; reordered parameters,
    # the largest part, are copies already.
    if len(carries) > 1:
        return stack_runs(carries)
    (only,) = carries
    return Carry(_lifted(only.params), *stack_runs([only[1:]]))


def carry_of(state: State, order: Any) -> Carry:
    """Returns the carry of one run, without the axis of runs."""
    return Carry(state.params, state.algorithm, order, state.round, state.faults, state.model)


@functools.partial(jax.jit, donate_argnums=0)
def _lifted(params: Any) -> Any:
    """Adds an axis of runs to the parameters of a single run, without a copy."""
    return jax.tree.map(lambda leaf: leaf[None], params)


def in_topology_order(layout: Layout, carry: Carry, keys: np.ndarray, of_pairs: Sequence[bool]) -> State:
    """Copies a stored carry to the host, which has room for it, in the topology's order, with the axis of runs."""
    fetched = jax.tree.map(transfer.fetched, carry._replace(order=()))
    on_host = State(fetched.params, fetched.algorithm, fetched.round, keys, fetched.faults, fetched.model)
    runs = [jax.tree.map(lambda leaf, run=run: leaf[run], on_host) for run in range(len(layout.runs))]
    each = zip(runs, layout.placements, strict=True)
    together: State = stack_runs([reordered(run, placement.slots, of_pairs) for run, placement in each], np)
    return together
