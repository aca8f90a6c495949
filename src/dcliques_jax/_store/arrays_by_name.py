"""Topologies and pytrees as arrays with names, as files keep them."""

from typing import Any

import jax
import numpy as np
import scipy.sparse

from dcliques_jax.topologies import Topology


def topology_arrays(topology: Topology) -> dict[str, np.ndarray]:
    """Returns all that a topology consists of but its name, by name."""
    fields = ("edges", "clique_ids", "gradient_edges", "arcs")
    arrays = {name: getattr(topology, name) for name in fields if getattr(topology, name) is not None}
    for number, matrix in enumerate(topology.matrices or ()):
        arrays |= {f"matrices/{number}/{name}": getattr(matrix, name) for name in ("data", "indices", "indptr")}
    return arrays | {"drawn": np.array(topology.drawn)}


def topology_of(arrays: dict[str, Any], num_nodes: int, name: str) -> Topology:
    """Inverts `topology_arrays`, after `nested`."""
    saved = arrays.get("matrices", {})
    parts = [[saved[str(number)][part] for part in ("data", "indices", "indptr")] for number in range(len(saved))]
    matrices = tuple(scipy.sparse.csr_array(tuple(part), shape=(num_nodes, num_nodes)) for part in parts)
    return Topology(
        num_nodes=num_nodes,
        edges=arrays["edges"],
        clique_ids=arrays.get("clique_ids"),
        gradient_edges=arrays.get("gradient_edges"),
        name=name,
        arcs=arrays.get("arcs"),
        matrices=matrices or None,
        drawn=bool(arrays["drawn"]),
    )


def named_leaves(prefix: str, tree: Any) -> dict[tuple[str, ...], np.ndarray]:
    """Returns the leaves of a pytree by path, `(prefix, path, ...)`, as arrays that NumPy can save.

    Random keys are converted to their data, and bfloat16 to float32.
    """
    arrays = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        is_key = isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        arrays[prefix, *names_of(path)] = array.astype(np.float32) if array.dtype.kind == "V" else array
    return arrays


def names_of(path: Any) -> list[str]:
    """Returns the names in the path of a leaf."""
    return [jax.tree_util.keystr((part,), simple=True) for part in path]


def by_name(prefix: str, tree: Any) -> dict[str, np.ndarray]:
    """Returns the leaves of a pytree by name, `prefix/path/...`."""
    arrays = named_leaves(prefix, tree)
    for names in arrays:
        if any("/" in name for name in names):
            raise ValueError(f"arrays are saved by name, and names must not contain '/': {list(names[1:])}")
    return {"/".join(names): array for names, array in arrays.items()}


def nested(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Converts arrays named `a/b/c` to nested dictionaries."""
    parts: dict[str, Any] = {}
    for name, array in arrays.items():
        *places, last = name.split("/")
        within = parts
        for place in places:
            within = within.setdefault(place, {})
        within[last] = array
    return parts
