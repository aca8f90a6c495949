"""How runs are stored on devices.

Nodes have two orders. The user, `Result` and checkpoints see the order of the topology, on any devices. Programs use
the order of storage, the slots: clique by clique, so that gossip reads most neighbours from the cache. On a mesh each
device holds the same number of slots; some are empty if nodes do not divide evenly.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dcliques_jax._engine import program
from dcliques_jax._engine.plan import Plan, Recipe, Run
from dcliques_jax._engine.program import Data, Examples
from dcliques_jax._mesh import halos, placement, transfer
from dcliques_jax._mesh.placement import Placement
from dcliques_jax._mixing.forms import Weights
from dcliques_jax._mixing.paced import over_bases
from dcliques_jax._mixing.sequences import Sequence, as_unions, to_common_form
from dcliques_jax.algorithms import Network
from dcliques_jax.datasets import Dataset
from dcliques_jax.topologies import Topology


class Layout(NamedTuple):
    """How runs that are simulated together are stored."""

    runs: list[Run]
    recipe: Recipe
    placements: list[Placement]
    examples_on_device: list[np.ndarray] | None  # on a mesh, the training examples that each device holds
    mesh: Mesh | None

    @property
    def num_slots(self) -> int:
        """Number of slots of a run."""
        return len(self.placements[0].order)

    @property
    def slots(self) -> np.ndarray:
        """The slot of each node, `[runs, nodes]`."""
        return np.stack([placement.slots for placement in self.placements])

    def of_nodes(self, values: np.ndarray) -> np.ndarray:
        """Converts values per slot, `[runs, .., slots]`, to values per node, `[runs, .., nodes]`."""
        return np.stack([run[..., slots] for run, slots in zip(values, self.slots, strict=True)])


def make_layout(runs: list[Run], recipe: Recipe, mesh: Mesh | None) -> Layout:
    """Stores nodes clique by clique; on a mesh each clique on one device."""
    if mesh is None:
        return Layout(runs, recipe, [_on_one_device(run.topology) for run in runs], None, None)
    placements = [placement.place(run.topology, mesh.size) for run in runs]
    widest = max(one.per_device for one in placements)
    placements = [one.widened(widest) for one in placements]
    indices = [run.data.indices[p.order].reshape(mesh.size, -1) for run, p in zip(runs, placements, strict=True)]
    held = [np.unique(np.concatenate([run[device] for run in indices])) for device in range(mesh.size)]
    return Layout(runs, recipe, placements, [ids[ids >= 0] for ids in held], mesh)


def _on_one_device(topology: Topology) -> Placement:
    if topology.clique_ids is None:
        return Placement(np.arange(topology.num_nodes), 1)
    return Placement(np.argsort(topology.clique_ids, kind="stable"), 1)


def stack_runs(trees: list[Any], numpy: Any = jnp) -> Any:
    """Stacks the pytrees of several runs, with the runs on the first axis."""
    if numpy is np and len(trees) == 1:
        return jax.tree.map(lambda leaf: leaf[None], trees[0])  # no copy
    return jax.tree.map(lambda *leaves: (jnp if transfer.is_key(leaves[0]) else numpy).stack(leaves), *trees)


def store_network(layout: Layout, networks: list[Network]) -> Network:
    """Stores the networks of all runs on the devices, in the order of slots, with the runs on the first axis."""

    def in_one_form(weights: Any) -> Any:
        common: Any = to_common_form(weights)
        return as_unions(common) if layout.mesh is not None and isinstance(common[0], Sequence) else common

    def together(*weights: Weights) -> Weights:
        each = zip(over_bases(in_one_form, weights), layout.placements, strict=True)
        moved = [matrix.reordered(placement.order) for matrix, placement in each]
        if layout.mesh is None:
            return stack_runs(moved)
        return stack_runs(list(over_bases(lambda part: halos.distributed(part, layout.placements), moved)), np)

    stacked = Network(*map(together, *networks))
    if layout.mesh is None:
        return stacked
    return transfer.put(stacked, jax.tree.map(lambda _: program.IN_PARTS, stacked), layout.mesh)


def host_data(layout: Layout, plan: Plan, keys: list[Any]) -> Data:
    """Returns the constant data of all rounds, on the host. `keys` are those of the runs."""
    each = zip(layout.runs, layout.placements, keys, strict=True)
    data: Data = stack_runs([_data_of_run(plan, *of_run) for of_run in each], np)
    return data


def _data_of_run(plan: Plan, run: Run, placement: Placement, key: Any) -> Data:
    order, used = placement.order, placement.order >= 0
    bounds = plan.bounds(run)[order]
    width = run.data.indices.shape[1]
    return Data(
        examples=np.pad(run.data.indices[order], ((0, 0), (0, plan.width - width)), constant_values=-1),
        sizes=np.where(used, run.data.sizes[order], 0).astype(np.int32),
        nodes=order.astype(np.int32),
        bounds=np.where(used[:, None], bounds, 0).astype(np.int32),
        key=np.asarray(key),
        width=np.int32(width) if plan.ragged else None,
        values={name: np.asarray(value, jnp.result_type(float)) for name, value in run.values.items()},
    )


def store_data(layout: Layout, data: Data) -> Data:
    """Stores the constant data of all rounds on devices. Examples are numbered per device."""
    if layout.mesh is None or layout.examples_on_device is None:
        return jax.tree.map(jnp.asarray, data)
    held = layout.examples_on_device

    def on_device(examples: np.ndarray) -> np.ndarray:
        parts = examples.reshape(len(held), -1)
        found = [np.searchsorted(ids, part) for ids, part in zip(held, parts, strict=True)]
        return np.where(parts < 0, -1, np.stack(found)).reshape(examples.shape).astype(np.int32)

    data = data._replace(examples=np.stack([on_device(rows) for rows in data.examples]))
    return transfer.put(data, program.data_specs(data), layout.mesh)


def host_examples(dataset: Dataset) -> Examples:
    """Returns all training examples, on the host."""
    inputs = dataset.train_inputs if dataset.byte_scale is None else dataset.train_bytes
    return Examples(inputs, dataset.byte_scale, dataset.train_labels)


def store_examples(layout: Layout) -> Examples:
    """Stores all training examples; on a mesh each device gets the examples that it needs."""
    inputs, byte_scale, labels = host_examples(layout.runs[0].data.dataset)
    if layout.mesh is None or layout.examples_on_device is None:
        return Examples(jnp.asarray(inputs), byte_scale, jnp.asarray(labels))
    longest = max(len(ids) for ids in layout.examples_on_device)
    held = np.concatenate([np.pad(ids, (0, longest - len(ids))) for ids in layout.examples_on_device])
    rows = [transfer.put_rows(array, held, layout.mesh) for array in (inputs, labels)]
    return Examples(rows[0], byte_scale, rows[1])


class EvaluatedSlots(NamedTuple):
    """The evaluated slots."""

    chosen: jax.Array | None  # [runs, ..] of each device, padded with -1; None: all slots
    found: np.ndarray  # [runs, eval_nodes] index of each node among the evaluated slots


def evaluated_slots(layout: Layout, plan: Plan) -> EvaluatedSlots:
    """Returns the slots of the evaluated nodes."""
    if plan.eval_nodes is None:
        return EvaluatedSlots(None, layout.slots)
    slots = np.stack([p.slots[plan.nodes(run)] for run, p in zip(layout.runs, layout.placements, strict=True)])
    num_devices, per_device = layout.placements[0].num_devices, layout.placements[0].per_device
    device, row = np.divmod(slots, per_device)
    rank = np.stack([placement.occurrences(run) for run in device])
    width = rank.max() + 1
    chosen = np.full((len(slots), num_devices, width), -1, np.int32)
    chosen[np.arange(len(slots))[:, None], device, rank] = row
    chosen = chosen.reshape(len(slots), -1)
    if layout.mesh is None:
        return EvaluatedSlots(jnp.asarray(chosen), device * width + rank)
    return EvaluatedSlots(transfer.put(chosen, PartitionSpec(None, transfer.AXIS), layout.mesh), device * width + rank)
