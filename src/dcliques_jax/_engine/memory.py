"""How much memory a run takes, told before any of it is taken."""

import os
from typing import Any, NamedTuple

import jax

from dcliques_jax._engine.plan import Run
from dcliques_jax.algorithms import Network

_SHARE = 0.9  # of all memory that a run may take; the rest is for the system, the data set on the host and Python


class Forecast(NamedTuple):
    """Bytes that one run takes on all devices together."""

    models: int  # parameters of all nodes
    state: int  # what the algorithm keeps besides: momentum, weights
    work: int  # gradients, and models after gossip beside those before
    examples: int  # training examples, and which node goes through which in what order

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)


def forecast(run: Run, params: Any, state: Any, network: Network) -> Forecast:
    """The memory of a run: one node's parameters and the algorithm's state have these shapes."""
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
    """Of all arrays in a pytree."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        kind: Any = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)  # keys of random generators
        total += leaf.size * kind.itemsize
    return total


def available(mesh: jax.sharding.Mesh | None) -> int:
    """Bytes that runs may take on all devices of a mesh, or on the default device."""
    stats = jax.local_devices()[0].memory_stats()
    if stats:
        return int(_SHARE * stats["bytes_limit"]) * (1 if mesh is None else mesh.size)
    # Devices of a CPU share the memory of its machine.
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(_SHARE * machine) * (1 if mesh is None else jax.process_count())


def check(run: Run, needed: Forecast, mesh: jax.sharding.Mesh | None) -> None:
    """Raises a `ValueError` for a run that cannot fit, with what would."""
    limit, nodes = available(mesh), run.data.num_nodes
    if needed.total <= limit:
        return
    fitting = nodes * (limit - needed.examples) // (needed.total - needed.examples)
    most = f"about {fitting:,} nodes of this model would fit" if fitting > 0 else "no number of nodes would fit"
    parts = ", ".join(f"{size / 1e9:.1f} GB {name}" for name, size in needed._asdict().items())
    raise ValueError(
        f"{nodes:,} nodes take {needed.total / 1e9:.1f} GB of memory ({parts}), more than the {limit / 1e9:.1f} GB "
        f"that may be used: {most}, or share them out over {-(-needed.total // limit)} times as many devices with mesh="
    )
