"""Estimates the memory of a run before it is allocated."""

import os
from typing import Any, NamedTuple

import jax

from dcliques_jax._engine.plan import Run
from dcliques_jax.algorithms import Network

_SHARE = 0.9  # of all memory that runs may use; the rest is for the system, the data set on the host and Python


class Forecast(NamedTuple):
    """Memory of one run on all devices together, in bytes."""

    models: int  # parameters of all nodes
    state: int  # state of the algorithm and its network: momentum, weights
    work: int  # gradients, and a second copy of the models during gossip
    examples: int  # training examples, and the lists and orders of examples per node

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self)


def forecast(run: Run, params: Any, state: Any, network: Network) -> Forecast:
    """Estimates the memory of a run from the shapes of one node's parameters and the algorithm's state."""
    data, dataset = run.data, run.data.dataset
    node = num_bytes(params)
    inputs = dataset.train_inputs.size * (1 if dataset.byte_scale else dataset.train_inputs.itemsize)
    lists = 2 * 4 * data.indices.size
    return Forecast(
        models=node * data.num_nodes,
        state=num_bytes((state, network)),
        work=2 * node * data.num_nodes,
        examples=inputs + 4 * len(dataset.train_labels) + lists,
    )


def num_bytes(tree: Any) -> int:
    """Returns the size of all arrays in a pytree, in bytes."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        kind: Any = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)  # random keys
        total += leaf.size * kind.itemsize
    return total


def available(mesh: jax.sharding.Mesh | None) -> int:
    """Returns the bytes that runs may use on all devices of a mesh, or on the default device."""
    stats = jax.local_devices()[0].memory_stats()
    if stats:
        return int(_SHARE * stats["bytes_limit"]) * (1 if mesh is None else mesh.size)
    # CPU devices share the memory of their machine.
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(_SHARE * machine) * (1 if mesh is None else jax.process_count())


def check(run: Run, needed: Forecast, mesh: jax.sharding.Mesh | None) -> None:
    """Raises a `ValueError` if a run does not fit into memory; the message says what would fit."""
    limit, nodes = available(mesh), run.data.num_nodes
    if needed.total <= limit:
        return
    fitting = nodes * (limit - needed.examples) // (needed.total - needed.examples)
    most = f"about {fitting:,} nodes of this model would fit" if fitting > 0 else "no number of nodes would fit"
    parts = ", ".join(f"{size / 1e9:.1f} GB {name}" for name, size in needed._asdict().items())
    raise ValueError(
        f"{nodes:,} nodes need {needed.total / 1e9:.1f} GB of memory ({parts}), but {limit / 1e9:.1f} GB are "
        f"available: {most}; or shard them over {-(-needed.total // limit)} times as many devices with mesh="
    )
