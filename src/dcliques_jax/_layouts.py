"""What rounds take, as it is stored on devices, and back again.

A state comes in two layouts. In the topology's order it is that of the user, of `Result` and of checkpoints, whatever
the devices. In the order of storage it is what programs run on: clique by clique, so that gossip reads most neighbours
from the cache, and on a mesh in equal parts, with empty places where nodes do not divide.
"""

import contextlib
import functools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dcliques_jax import _devices, _executables, _halos, _placements, _programs, mixing, sampling
from dcliques_jax._executables import Lowered
from dcliques_jax._placements import Placement
from dcliques_jax._plans import Parts, Plan, Run
from dcliques_jax._programs import Data, Examples, Program, SimulationState
from dcliques_jax.datasets import Dataset
from dcliques_jax.topologies import Topology

_PLACES = (
    "on a mesh an algorithm sees the nodes of one device only, in the order in which they are stored: row k is not "
    "node k, and what is drawn with a key repeats on every device"
)
_MOST_ROUNDS = 1024  # that are run at a time
_MOST_LOSSES = 2**18  # that they return: as many as there are nodes in every round


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
    if not _executables.installed(parts.algorithm.step):
        warnings.warn(_PLACES, UserWarning, stacklevel=3)
    placements = [_placements.place(run.topology, mesh.size) for run in runs]
    most = max(placement.per_device for placement in placements)
    placements = [placement.widened(most) for placement in placements]
    indices = [run.data.indices[p.order].reshape(mesh.size, -1) for run, p in zip(runs, placements, strict=True)]
    held = [np.unique(np.concatenate([run[device] for run in indices])) for device in range(mesh.size)]
    return Layout(runs, parts, placements, [ids[ids >= 0] for ids in held], mesh)


def _on_one_device(topology: Topology, parts: Parts) -> Placement:
    # A step of one's own may tell nodes by where they are stored: it gets them in order.
    own = not _executables.installed(parts.algorithm.step)
    if topology.clique_ids is None or parts.algorithm.reorder is None or own:
        return Placement(np.arange(topology.num_nodes), 1)
    return Placement(np.argsort(topology.clique_ids, kind="stable"), 1)


class Rounds(NamedTuple):
    """The compiled rounds of some runs, with all that they take."""

    program: jax.stages.Compiled
    state: SimulationState  # before the first round
    data: Data
    examples: Examples
    most_rounds: int  # that can be run at a time

    def run(self, state: SimulationState, num_rounds: int) -> Any:
        """See `_programs.run`."""
        return self.program(state, self.data, self.examples, num_rounds)

    def memory(self) -> int:
        """Bytes of device memory that rounds take at their peak, data and all."""
        needs: Any = self.program.memory_analysis()
        held: int = needs.argument_size_in_bytes + needs.output_size_in_bytes - needs.alias_size_in_bytes
        return held + int(needs.temp_size_in_bytes)


def prepare(
    layout: Layout, plan: Plan, starts: list[SimulationState] | None = None, lowered: Lowered | None = None
) -> Rounds:
    """Rounds that begin with given states in the topology's order, by default with those of `start`; see `stored`.

    `lowered` is the program on one device, where it is known.
    """
    state = stored(layout, start(layout, plan) if starts is None else starts)
    data, examples = make_data(layout, plan), make_examples(layout)
    if layout.mesh is not None or lowered is None:
        lowered = lower(layout, plan, state, data, examples)
    return Rounds(lowered.compile(layout.mesh), state, data, examples, _most_rounds(layout))


def lower(layout: Layout, plan: Plan, state: Any, data: Data, examples: Examples) -> Lowered:
    """The program of rounds, before it is compiled."""
    model, _, algorithm, loss_fn, _ = layout.parts
    program = Program(model.apply, loss_fn, algorithm.step, plan.batch_size, plan.rounds_per_epoch)
    options: dict[str, Any] = {"most_rounds": _most_rounds(layout), "mesh": layout.mesh}
    return _executables.lower(_programs.run, program, state, data, examples, 1, donate=(0,), **options)


def _most_rounds(layout: Layout) -> int:
    """Rounds to run at a time. Their losses must fit into little memory, however seldom models are evaluated."""
    return int(np.clip(_MOST_LOSSES // layout.num_places, 1, _MOST_ROUNDS))


def lower_on_one_device(layout: Layout, plan: Plan, starts: Sequence[SimulationState]) -> Lowered:
    """The program as it is on one device, whatever the mesh: its checksum tells what is computed, not where."""
    on_one = layout if layout.mesh is None else make_layout(layout.runs, layout.parts, None)
    state = jax.eval_shape(lambda *states: stacked(states), *starts)
    dataset = layout.runs[0].data.dataset
    examples = Examples(_train_inputs(dataset), dataset.byte_scale, dataset.train_labels)
    return lower(on_one, plan, state, _host_data(on_one, plan), examples)


def _train_inputs(dataset: Dataset) -> Any:
    return dataset.train_inputs if dataset.byte_scale is None else dataset.train_bytes


def start(layout: Layout, plan: Plan) -> list[SimulationState]:
    """The states before the first round in the topology's order, without the axis of runs.

    Those of a mesh are made in the memory of the host, which is larger than that of a device.
    """
    on_host = jax.default_device(jax.local_devices(backend="cpu")[0]) if layout.mesh else contextlib.nullcontext()
    with on_host:
        states = mixing.alike([_start(run, layout.parts, plan) for run in layout.runs])
        if layout.mesh is not None:
            _devices.check_separate(layout.parts.algorithm.step, states[0].params, states[0].algorithm)
        return states


def _start(run: Run, parts: Parts, plan: Plan) -> SimulationState:
    init_key, _ = _keys(run)
    if isinstance(parts.init, str):
        example = run.data.dataset.train_inputs[:1]
        options: dict[str, Any] = {"kind": parts.init, "num_nodes": run.data.num_nodes}
        lowered = _executables.lower(_programs.random_params, parts.model.init, init_key, example, **options)
        params = lowered.compile()(init_key, example)
    else:
        params = _programs.stacked(jax.tree.map(jnp.asarray, parts.init), run.data.num_nodes)
    algorithm_state = _devices.as_arrays(parts.algorithm.init(run.topology, params))
    order = jnp.zeros((run.data.num_nodes, plan.width), jnp.int32)  # drawn in the first round
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
    return _devices.put(data, _programs.data_specs(data), layout.mesh)


def _host_data(layout: Layout, plan: Plan) -> Data:
    both = zip(layout.runs, layout.placements, strict=True)
    data: Data = stacked([_data_of_run(plan, run, placement) for run, placement in both], np)
    return data


def _data_of_run(plan: Plan, run: Run, placement: Placement) -> Any:
    order, used = placement.order, placement.order >= 0
    bounds = sampling.bounds(run.data.sizes, plan.batch_size, plan.largest)[order]
    width = run.data.indices.shape[1]
    return Data(
        examples=np.pad(run.data.indices[order], ((0, 0), (0, plan.width - width)), constant_values=-1),
        sizes=np.where(used, run.data.sizes[order], 0).astype(np.int32),
        nodes=order.astype(np.int32),
        bounds=np.where(used[:, None], bounds, 0).astype(np.int32),
        key=np.asarray(jax.random.key_data(_keys(run)[1])),
        width=np.int32(width) if plan.ragged else None,
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
