"""What a topology costs and promises, before any training."""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse.csgraph

from dcliques_jax import _checks, _html, cliques, mixing
from dcliques_jax._mesh import halos, placement
from dcliques_jax.topologies import Topology

_MOST_DISTANCES = 10_000_000  # to measure; in larger graphs from fewer, random nodes


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The properties of a topology under Metropolis-Hastings weights. It prints as a table, in notebooks as HTML.

    Messages are counted per node and round. Averaging gradients takes further messages. The paper counts two messages
    per edge and direction, `messages_averaging_paper`. Gradients only travel over the edges inside cliques, which gives
    the tight count `messages_averaging`. Skews are None without a label distribution, bytes without a number of
    parameters.
    """

    name: str
    num_nodes: int
    num_edges: int
    num_cliques: int | None
    edges_per_node: float
    min_edges: int
    max_edges: int
    second_eigenvalue: float  # |lambda2| of the gossip matrix
    mean_distance: float
    diameter: int
    distance_sources: int  # nodes from which distances were measured; unless all, the diameter may be larger
    clique_skew: float | None  # mean over cliques
    max_clique_skew: float | None
    neighbourhood_skew: float | None  # mean over nodes of the skew of a node and its neighbours
    max_neighbourhood_skew: float | None
    messages: float
    messages_averaging: float | None
    messages_averaging_paper: float | None
    bytes: float | None
    bytes_averaging: float | None
    num_devices: int | None = None  # of the mesh; whole cliques share a device
    cut_edges: int | None = None  # edges between nodes on different devices
    rows_between_devices: int | None = None  # models that leave a device per round, sum over devices
    rows_between_devices_averaging: int | None = None  # models and gradients
    bytes_between_devices: int | None = None
    bytes_between_devices_averaging: int | None = None

    @property
    def spectral_gap(self) -> float:
        """One minus `|lambda2|`."""
        return 1.0 - self.second_eigenvalue

    def _title(self) -> str:
        cliques_part = "" if self.num_cliques is None else f", {self.num_cliques} cliques"
        return f"{self.name}: {self.num_nodes:,} nodes{cliques_part}, {self.num_edges:,} edges"

    def _rows(self) -> list[tuple[str, str]]:
        sampled = self.distance_sources < self.num_nodes
        least, said = ("at least ", f", measured from {self.distance_sources:,} random nodes") if sampled else ("", "")
        rows = [
            ("edges per node", f"{self.edges_per_node:.2f} ({self.min_edges} to {self.max_edges})"),
            ("|lambda2|", f"{self.second_eigenvalue:.5f} (spectral gap {self.spectral_gap:.3g})"),
            ("distance between nodes", f"{self.mean_distance:.2f} (diameter {least}{self.diameter}{said})"),
        ]
        if self.clique_skew is not None:
            rows.append(("clique skew", f"{self.clique_skew:.3f} (at most {self.max_clique_skew:.3f})"))
        if self.neighbourhood_skew is not None:
            text = f"{self.neighbourhood_skew:.3f} (at most {self.max_neighbourhood_skew:.3f})"
            rows.append(("neighbourhood skew", text))
        rows.append(("messages per node and round", f"{self.messages:.1f}"))
        if self.messages_averaging is not None:
            text = f"{self.messages_averaging:.1f} ({self.messages_averaging_paper:.1f} as the paper counts)"
            rows.append(("  with gradient averaging", text))
        if self.bytes is not None:
            rows.append(("bytes per node and round", _bytes(self.bytes)))
        if self.bytes_averaging is not None:
            rows.append(("  with gradient averaging", _bytes(self.bytes_averaging)))
        if self.cut_edges is not None:
            cut = f"{self.cut_edges:,} of {self.num_edges:,} ({self.cut_edges / max(1, self.num_edges):.1%})"
            rows.append((f"edges between {self.num_devices} devices", cut))
            rows.append(("models moved between devices", f"{self.rows_between_devices:,} per round"))
        if self.bytes_between_devices is not None:
            rows.append(("bytes moved between devices", f"{_bytes(self.bytes_between_devices)} per round"))
        if self.bytes_between_devices_averaging is not None:
            rows.append(("  with gradient averaging", f"{_bytes(self.bytes_between_devices_averaging)} per round"))
        return rows

    def __str__(self) -> str:
        return "\n".join([self._title(), *(f"  {label:<28} {value}" for label, value in self._rows())])

    def __repr__(self) -> str:
        grouped = "" if self.num_cliques is None else f", cliques={self.num_cliques}"
        return (
            f"Report({self.name!r}, num_nodes={self.num_nodes}, edges={self.num_edges}{grouped}, "
            f"edges_per_node={self.edges_per_node:.2f}, spectral_gap={self.spectral_gap:.3g})"
        )

    def _repr_html_(self) -> str:
        return _html.table(self._title(), self._rows())


def make_report(
    topology: Topology,
    label_distribution: npt.ArrayLike | None = None,
    *,
    num_parameters: int | None = None,
    num_devices: int | None = None,
) -> Report:
    """Measures a topology. `topology.report(...)` is the usual way to call it.

    Args:
      topology: any topology.
      label_distribution: p_i(y) of every node, `[nodes, classes]`. The skews need it.
      num_parameters: size of the model. The bytes that a node sends need it, at 4 bytes per parameter.
      num_devices: number of devices of a mesh. The traffic of `simulate(mesh=...)` between devices needs it.
    """
    degrees, ids = topology.degrees, topology.clique_ids
    skews = _skews(topology, label_distribution)
    messages = float(degrees.mean())
    averaging = averaging_paper = None
    if topology.gradient_edges is not None:
        averaging = messages + 2 * len(topology.gradient_edges) / topology.num_nodes
        averaging_paper = 2 * messages
    size = None if num_parameters is None else 4 * _checks.integer("num_parameters", num_parameters, 0)
    mean_distance, diameter, sources = _distances(topology)
    between = {} if num_devices is None else _between_devices(topology, num_devices, size)
    return Report(
        **between,
        **skews,
        name=topology.name,
        num_nodes=topology.num_nodes,
        num_edges=len(topology.edges),
        num_cliques=None if ids is None else int(ids.max()) + 1,
        edges_per_node=messages,
        min_edges=int(degrees.min()),
        max_edges=int(degrees.max()),
        second_eigenvalue=mixing.second_eigenvalue(mixing.metropolis_hastings(topology)),
        mean_distance=mean_distance,
        diameter=diameter,
        distance_sources=sources,
        messages=messages,
        messages_averaging=averaging,
        messages_averaging_paper=averaging_paper,
        bytes=None if size is None else messages * size,
        bytes_averaging=None if size is None or averaging is None else averaging * size,
    )


def _skews(topology: Topology, label_distribution: npt.ArrayLike | None) -> dict[str, Any]:
    """How far the labels of cliques and of neighbourhoods are from those of all nodes; None where there are none."""
    skews: dict[str, np.ndarray | None] = {"clique_skew": None, "neighbourhood_skew": None}
    if label_distribution is not None:
        p = cliques.check_label_distribution(label_distribution)
        if len(p) != topology.num_nodes:
            raise ValueError(f"label_distribution has {len(p)} rows, the topology {topology.num_nodes} nodes")
        neighbourhoods = (topology.adjacency() @ p + p) / (topology.degrees + 1)[:, None]
        skews["neighbourhood_skew"] = np.abs(neighbourhoods - p.mean(axis=0)).sum(axis=1)
        if topology.clique_ids is not None:
            skews["clique_skew"] = cliques.skew(topology.clique_ids, p)
    means = {name: None if values is None else float(values.mean()) for name, values in skews.items()}
    return means | {f"max_{name}": None if values is None else float(values.max()) for name, values in skews.items()}


def _between_devices(topology: Topology, num_devices: int, size: int | None) -> dict[str, int | None]:
    """Counts what `simulate` moves per round on a mesh of that many devices."""
    num_devices = _checks.integer("num_devices", num_devices, 1)
    ours = placement.place(topology, num_devices)

    def moved(weights: mixing.Weights) -> int:
        (shared,) = halos.distributed([weights.reordered(ours.order)], [ours])
        return halos.moved_rows(shared, num_devices)

    rows = moved(mixing.metropolis_hastings(topology))
    averaging = None if topology.gradient_edges is None else rows + moved(mixing.clique_average(topology))
    return {
        "num_devices": num_devices,
        "cut_edges": ours.cut(topology),
        "rows_between_devices": rows,
        "rows_between_devices_averaging": averaging,
        "bytes_between_devices": None if size is None else rows * size,
        "bytes_between_devices_averaging": None if size is None or averaging is None else averaging * size,
    }


def _distances(topology: Topology) -> tuple[float, int, int]:
    """Measures the mean distance of two nodes and the largest distance, and counts the nodes measured from."""
    n = topology.num_nodes
    if len(topology.edges) == n * (n - 1) // 2:
        return float(n > 1), int(n > 1), n
    sources = np.random.default_rng(0).permutation(n)[: max(1, _MOST_DISTANCES // n)]
    distances = scipy.sparse.csgraph.shortest_path(topology.adjacency(), unweighted=True, indices=sources)
    return float(distances.sum() / (len(sources) * (n - 1))), int(distances.max()), len(sources)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
