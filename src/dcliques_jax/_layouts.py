"""What rounds take, as it is stored on devices, and back again.

A state comes in two layouts. In the topology's order it is that of the user, of `Result` and of checkpoints, whatever
the devices. In the order of storage it is what programs run on: clique by clique, so that gossip reads most neighbours
from the cache, and on a mesh in equal parts, with empty places where nodes do not divide.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dcliques_jax import _checks, _devices, _halos, _placements, _programs, mixing, sampling
from dcliques_jax._placements import Placement
from dcliques_jax._plans import Parts, Plan, Run
from dcliques_jax._programs import Data, Examples, Program, SimulationState
from dcliques_jax._static import Static
from dcliques_jax.datasets import Dataset
from dcliques_jax.topologies import Topology


class Layout(NamedTuple):
    """How runs that are simulated at once are stored."""

    runs: list[Run]
    parts: Parts
    placements: list[Placement]
    held: list[np.ndarray] | None  # on a mesh, the training examples that each device holds
    mesh: Mesh | None

    @property
    def num_places(self) -> int:
        """Of a run."""
        return len(self.placements[0].order)

    @property
    def places(self) -> np.ndarray:
        """The place of each node, `[runs, nodes]`."""
        return np.stack([placement.places for placement in self.placements])


def make_layout(runs: list[Run], parts: Parts, mesh: Mesh | None) -> Layout:
    """Clique by clique, as far as the algorithm can be reordered; on a mesh it must be."""
    if mesh is None:
        return Layout(runs, parts, [_on_one_device(run.topology, parts) for run in runs], None, None)
    if parts.algorithm.reorder is None:
        raise ValueError(
            "a mesh needs an algorithm that can reorder its state: give Algorithm(init, step, reorder) all three"
        )
    placements = [_placements.place(run.topology, mesh.size) for run in runs]
    most = max(placement.per_device for placement in placements)
    placements = [placement.widened(most) for placement in placements]
    indices = [run.data.indices[p.order].reshape(mesh.size, -1) for run, p in zip(runs, placements, strict=True)]
    held = [np.unique([run[device] for run in indices]) for device in range(mesh.size)]
    return Layout(runs, parts, placements, [ids[ids >= 0] for ids in held], mesh)


def _on_one_device(topology: Topology, parts: Parts) -> Placement:
    if topology.clique_ids is None or parts.algorithm.reorder is None:
        return Placement(np.arange(topology.num_nodes), 1)
    return Placement(np.argsort(topology.clique_ids, kind="stable"), 1)


class Rounds(NamedTuple):
    """The compiled rounds of some runs, with all that they take."""

    program: Static[Program]
    state: SimulationState  # before the first round
    data: Data
    examples: Examples
    mesh: Mesh | None

    def run(self, state: SimulationState, num_rounds: int, most_rounds: int) -> Any:
        """See `_programs.run`."""
        arguments = {"most_rounds": most_rounds, "mesh": self.mesh}
        return _programs.run(self.program, state, self.data, self.examples, num_rounds, **arguments)

    def lower(self, most_rounds: int) -> Any:
        """The program, before it is compiled."""
        arguments = {"most_rounds": most_rounds, "mesh": self.mesh}
        return _programs.run.lower(self.program, self.state, self.data, self.examples, 1, **arguments)


def prepare(layout: Layout, plan: Plan, starts: list[SimulationState] | None = None) -> Rounds:
    """Rounds that begin with given states in the topology's order, by default with those of `start`; see `stored`."""
    state = stored(layout, start(layout) if starts is None else starts)
    return Rounds(make_program(layout.parts, plan), state, make_data(layout, plan), make_examples(layout), layout.mesh)


def program_checksum(layout: Layout, plan: Plan, starts: Sequence[SimulationState]) -> str:
    """A checksum of the program as it is on one device, whatever the mesh: what is computed, not where."""
    on_one = layout if layout.mesh is None else make_layout(layout.runs, layout.parts, None)
    state = jax.eval_shape(lambda *states: stacked(states), *starts)
    dataset = layout.runs[0].data.dataset
    examples = Examples(_train_inputs(dataset), dataset.byte_scale, dataset.train_labels)
    program, data = make_program(layout.parts, plan), _host_data(on_one, plan)
    lowered = _programs.run.lower(program, state, data, examples, 1, most_rounds=1)  # however often it is evaluated
    return _checks.checksum(lowered.as_text().encode())


def _train_inputs(dataset: Dataset) -> Any:
    return dataset.train_inputs if dataset.byte_scale is None else dataset.train_bytes


def make_program(parts: Parts, plan: Plan) -> Static[Program]:
    """What rounds depend on besides shapes."""
    model, _, algorithm, loss_fn, _ = parts
    return Static(Program(model.apply, loss_fn, algorithm.step, plan.batch_size, plan.rounds_per_epoch))


def start(layout: Layout) -> list[SimulationState]:
    """The states before the first round in the topology's order, without the axis of runs.

    Those of a mesh are made in the memory of the host, which is larger than that of a device.
    """
    on_host = jax.default_device(jax.local_devices(backend="cpu")[0]) if layout.mesh else contextlib.nullcontext()
    with on_host:
        states = mixing.alike([_start(run, layout.parts) for run in layout.runs])
        if layout.mesh is not None:
            _devices.check_separate(layout.parts.algorithm.step, states[0].params, states[0].algorithm)
        return states


def _start(run: Run, parts: Parts) -> SimulationState:
    init_key, _ = _keys(run)
    if isinstance(parts.init, str):
        example = run.data.dataset.train_inputs[:1]
        params = _programs.random_params(Static(parts.model.init), parts.init, run.data.num_nodes, init_key, example)
    else:
        params = _programs.stacked(jax.tree.map(jnp.asarray, parts.init), run.data.num_nodes)
    algorithm_state = _devices.as_arrays(parts.algorithm.init(run.topology, params))
    order = jnp.zeros(run.data.indices.shape, jnp.int32)  # drawn in the first round
    return SimulationState(params, algorithm_state, order, jnp.zeros((), jnp.int32))


def _keys(run: Run) -> jax.Array:
    """One for the initial models, one for the order of examples."""
    return jax.random.split(jax.random.key(run.seed, impl="threefry2x32"))


def stored(layout: Layout, states: list[SimulationState]) -> SimulationState:
    """States in the topology's order, as they are stored on devices. The list is emptied: it is as large as they."""
    algorithm, mesh = layout.parts.algorithm, layout.mesh
    moved = [states.pop(0).reordered(algorithm, placement.order) for placement in layout.placements]
    if mesh is None:
        # The program takes over the state's buffers, of which none may be the caller's. Stacking copies; reordered
        # parameters, the largest part, are copies already.
        if len(moved) > 1:
            return stacked(moved)
        (only,) = moved
        return SimulationState(_lifted(only.params), *stacked([only[1:]]))
    together = stacked(_halos.distributed(moved, layout.placements), np)
    return _devices.put(together, _devices.specs(together, layout.num_places), mesh)


def in_topology_order(layout: Layout, state: SimulationState, weights: Sequence[Any]) -> SimulationState:
    """A stored state in the topology's order, with the axis of runs; on the host, where there is room for a copy.

    On a mesh, weights have a form from which there is no way back; those of the start take their place.
    """
    if layout.mesh is not None:
        return stacked(_devices.in_topology_order(state, layout.placements, weights), np)
    on_host = jax.tree.map(_devices.fetched, state)
    runs = [jax.tree.map(lambda leaf, run=run: leaf[run], on_host) for run in range(len(layout.runs))]
    algorithm = layout.parts.algorithm
    return stacked([run.reordered(algorithm, p.places) for run, p in zip(runs, layout.placements, strict=True)], np)


@functools.partial(jax.jit, donate_argnums=0)
def _lifted(params: Any) -> Any:
    """The parameters of a single run with an axis of runs, in the same memory."""
    return jax.tree.map(lambda leaf: leaf[None], params)


def stacked(trees: Sequence[Any], numpy: Any = jnp) -> Any:
    """Pytrees of several runs as one, runs first."""
    if numpy is np and len(trees) == 1:
        return jax.tree.map(lambda leaf: leaf[None], trees[0])  # no copy
    return jax.tree.map(lambda *leaves: (jnp if _devices.is_key(leaves[0]) else numpy).stack(leaves), *trees)


def make_data(layout: Layout, plan: Plan) -> Data:
    """What stays the same in all rounds."""
    data = _host_data(layout, plan)
    if layout.mesh is None:
        return jax.tree.map(jnp.asarray, data)
    data = data._replace(examples=np.stack([_local(layout, rows) for rows in data.examples]))
    return _devices.put(data, _programs.DATA_SPECS, layout.mesh)


def _host_data(layout: Layout, plan: Plan) -> Data:
    both = zip(layout.runs, layout.placements, strict=True)
    data: Data = stacked([_data_of_run(plan, run, placement) for run, placement in both], np)
    return data


def _data_of_run(plan: Plan, run: Run, placement: Placement) -> Any:
    order, used = placement.order, placement.order >= 0
    bounds = sampling.bounds(run.data.sizes, plan.batch_size)[order]
    return Data(
        examples=run.data.indices[order],
        sizes=np.where(used, run.data.sizes[order], 0).astype(np.int32),
        nodes=order.astype(np.int32),
        bounds=np.where(used[:, None], bounds, 0).astype(np.int32),
        key=np.asarray(jax.random.key_data(_keys(run)[1])),
    )


def _local(layout: Layout, examples: np.ndarray) -> np.ndarray:
    """Numbers of examples `[places, most]` as their places among those that the device holds."""
    assert layout.held is not None
    parts = examples.reshape(len(layout.held), -1)
    found = [np.searchsorted(ids, part) for ids, part in zip(layout.held, parts, strict=True)]
    return np.where(parts < 0, -1, np.stack(found)).reshape(examples.shape).astype(np.int32)


def make_examples(layout: Layout) -> Examples:
    """All training examples; on a mesh those that each device needs."""
    dataset = layout.runs[0].data.dataset
    inputs, labels = _train_inputs(dataset), dataset.train_labels
    if layout.mesh is None or layout.held is None:
        return Examples(jnp.asarray(inputs), dataset.byte_scale, jnp.asarray(labels))
    most = max(len(ids) for ids in layout.held)
    held = np.concatenate([np.pad(ids, (0, most - len(ids))) for ids in layout.held])
    rows = [_devices.put_rows(array, held, layout.mesh) for array in (inputs, labels)]
    return Examples(rows[0], dataset.byte_scale, rows[1])


class Evaluated(NamedTuple):
    """Which places are evaluated."""

    places: jax.Array | None  # [runs, ..] of each device, as many for each, -1 for none; None: all
    found: np.ndarray  # [runs, eval_nodes] where each node is among all that are evaluated


def make_evaluated(layout: Layout, plan: Plan) -> Evaluated:
    """The places of the nodes that are evaluated."""
    if plan.eval_nodes is None:
        return Evaluated(None, layout.places)
    places = np.stack([p.places[plan.nodes(run)] for run, p in zip(layout.runs, layout.placements, strict=True)])
    num_devices, per_device = layout.placements[0].num_devices, layout.placements[0].per_device
    device, row = np.divmod(places, per_device)
    turn = np.stack([_placements.turns(run) for run in device])
    most = turn.max() + 1
    chosen = np.full((len(places), num_devices, most), -1, np.int32)
    chosen[np.arange(len(places))[:, None], device, turn] = row
    chosen = chosen.reshape(len(places), -1)
    if layout.mesh is None:
        return Evaluated(jnp.asarray(chosen), device * most + turn)
    spec = _devices.specs(chosen, chosen.shape[1])
    return Evaluated(_devices.put(chosen, spec, layout.mesh), device * most + turn)
