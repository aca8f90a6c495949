"""What is measured of a topology: labels around nodes, how fast gossip mixes, distances, what devices exchange."""

from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
import scipy.sparse.csgraph

from dcliques_jax import _checks, cliques, mixing
from dcliques_jax._mesh import halos, placement
from dcliques_jax._mixing import spectrum
from dcliques_jax._mixing.sequences import as_unions
from dcliques_jax.clocks import Clock
from dcliques_jax.topologies import Topology

_MOST_DISTANCES = 10_000_000  # to measure; in larger graphs from fewer, random nodes

MATRICES = {
    "symmetric": "symmetric",
    "columns": "doubly stochastic, directed",
    "rows": "rows sum to 1, columns do not",
}


def speed(weights: mixing.Weights, matrix: str) -> tuple[dict[str, Any], spectrum.Extremes | None]:
    """Computes the extreme eigenvalues of one symmetric matrix, else None, and the contraction of any weights."""
    if matrix != "symmetric" or isinstance(weights, mixing.Moving):
        contraction = mixing.contraction(weights)
        return {"second_eigenvalue": None, "smallest_eigenvalue": None, "contraction": contraction}, None
    found = spectrum.extremes(weights)
    second = max(abs(found.largest), abs(found.smallest))
    measured = {
        "second_eigenvalue": second,
        "smallest_eigenvalue": found.smallest,
        "contraction": spectrum.squared(second),
    }
    return measured, found


def labels(topology: Topology, weights: mixing.Weights, label_distribution: npt.ArrayLike | None) -> dict[str, Any]:
    """Measures how far the labels of cliques and neighbourhoods are from those of all nodes; None without labels."""
    skews: dict[str, np.ndarray | None] = {"clique_skew": None, "neighbourhood_skew": None}
    bias = None
    if label_distribution is not None:
        p = cliques.check_label_distribution(label_distribution)
        if len(p) != topology.num_nodes:
            raise ValueError(f"label_distribution has {len(p)} rows, the topology {topology.num_nodes} nodes")
        bias = label_bias(weights, p)
        if not topology.drawn:
            near = topology.heard()
            mean = (near @ p + p) / (near.sum(axis=1) + 1)[:, None]
            skews["neighbourhood_skew"] = np.abs(mean - p.mean(axis=0)).sum(axis=1)
        if topology.clique_ids is not None:
            skews["clique_skew"] = cliques.skew(topology.clique_ids, p)
    means = {name: None if values is None else float(values.mean()) for name, values in skews.items()}
    most = {f"max_{name}": None if values is None else float(values.max()) for name, values in skews.items()}
    return means | most | {"label_bias": bias, "weight_variance": weight_variance(weights)}


def label_bias(weights: mixing.Weights, p: np.ndarray) -> float:
    """Computes (1 / n) |W p - 1 pbar^T|_F^2, the mean over the matrices of a sequence."""
    apart = p - p.mean(axis=0)
    if isinstance(weights, mixing.GroupMean):  # of all nodes
        return 0.0
    if isinstance(weights, mixing.Drawn):
        return mixing.contraction(weights) * float((apart**2).sum()) / len(p)
    return float(np.mean([((matrix @ apart) ** 2).sum() for matrix in weights.matrices()])) / len(p)


def weight_variance(weights: mixing.Weights) -> float:
    """Computes |W - J|_F^2 / n, the mean over the matrices of a sequence. Rows sum to 1, so it is (|W|_F^2 - 1) / n."""
    if isinstance(weights, mixing.GroupMean):  # of all nodes
        return 0.0
    return float(np.mean([spectrum.squares(matrix) - 1 for matrix in weights.matrices()])) / weights.num_nodes


def distances(topology: Topology) -> dict[str, Any]:
    """Measures the mean distance of two nodes and the largest distance, and counts the nodes measured from.

    Both are None if nodes cannot reach each other, or if links are drawn in every round.
    """
    n = topology.num_nodes
    if topology.drawn:
        return {"mean_distance": None, "diameter": None, "distance_sources": 0}
    if topology.arcs is None and len(topology.edges) == n * (n - 1) // 2:
        return {"mean_distance": float(n > 1), "diameter": int(n > 1), "distance_sources": n}
    sources = np.random.default_rng(0).permutation(n)[: max(1, _MOST_DISTANCES // n)]
    found = scipy.sparse.csgraph.shortest_path(topology.heard().T, unweighted=True, indices=sources)
    if not np.isfinite(found).all():
        return {"mean_distance": None, "diameter": None, "distance_sources": len(sources)}
    mean = float(found.sum() / (len(sources) * (n - 1)))
    return {"mean_distance": mean, "diameter": int(found.max()), "distance_sources": len(sources)}


def between_devices(
    topology: Topology, weights: mixing.Weights, num_devices: int, size: int | None
) -> dict[str, int | None]:
    """Counts what `simulate` moves per round on a mesh of that many devices."""
    num_devices = _checks.integer("num_devices", num_devices, 1)
    if topology.drawn:
        raise ValueError(
            f"num_devices={num_devices}: {topology.name} is drawn in every round, which needs all nodes on one device; "
            "omit num_devices"
        )
    ours = placement.place(topology, num_devices)

    def moved(matrix: mixing.Weights) -> int:
        if isinstance(matrix, mixing.Sequence):
            (matrix,) = as_unions([matrix])  # rows of all rounds together move, whichever the round reads
        (shared,) = halos.distributed([matrix.reordered(ours.order)], [ours])
        return halos.moved_rows(shared, num_devices)

    rows = moved(weights)
    averaging = None if topology.gradient_edges is None else rows + moved(mixing.clique_average(topology))
    return {
        "num_devices": num_devices,
        "cut_edges": ours.cut(topology),
        "rows_between_devices": rows,
        "rows_between_devices_averaging": averaging,
        "bytes_between_devices": None if size is None else rows * size,
        "bytes_between_devices_averaging": None if size is None or averaging is None else averaging * size,
    }


def traffic(topology: Topology, weights: mixing.Weights, size: int | None, clock: Clock | None) -> dict[str, Any]:
    """Counts messages per node and round, and their bytes and seconds for a model of `size` bytes."""
    gossip = mixing.messages(weights)
    messages, averaging, with_averaging = float(gossip.sent.mean()), None, None
    if topology.gradient_edges is not None:
        averaging = messages + 2 * len(topology.gradient_edges) / topology.num_nodes
        gradients = mixing.messages(mixing.clique_average(topology))
        with_averaging = mixing.Messages(*(models + more for models, more in zip(gossip, gradients, strict=True)))
    return {
        "messages": messages,
        "max_messages": int(gossip.sent.max()),
        "messages_averaging": averaging,
        "messages_averaging_paper": None if averaging is None else 2 * messages,
        "bytes": None if size is None else messages * size,
        "bytes_averaging": None if size is None or averaging is None else averaging * size,
        "seconds": _seconds(clock, gossip, size),
        "seconds_averaging": _seconds(clock, with_averaging, size),
    }


def _seconds(clock: Clock | None, sent: mixing.Messages | None, size: int | None) -> float | None:
    """Computes the mean length of rounds."""
    if clock is None or sent is None or size is None:
        return None
    return float(clock.seconds(size * sent.sent, size * sent.received, sent.phases).mean())
