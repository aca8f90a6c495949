"""What a topology costs and promises, before any training."""

import dataclasses
import html

import numpy as np
import numpy.typing as npt
import scipy.sparse.csgraph

from dcliques_jax import _checks, cliques, mixing
from dcliques_jax.topologies import Topology

_MOST_SOURCES = 2000  # nodes from which distances are measured; in larger graphs, that many random ones


@dataclasses.dataclass(frozen=True)
class Report:
    """The properties of a topology under Metropolis-Hastings weights; prints as a table, in notebooks as HTML.

    Messages are counted per node and round. Averaging gradients needs messages of their own: the paper counts two for
    every edge, `messages_averaging_paper`. Gradients only need the edges inside cliques, which gives the tight count
    `messages_averaging`. Skews are None without a label distribution, bytes without a number of parameters.
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
    distance_sources: int  # nodes from which distances were measured
    clique_skew: float | None  # mean over cliques
    max_clique_skew: float | None
    neighbourhood_skew: float | None  # mean over nodes of the skew of a node and its neighbours
    max_neighbourhood_skew: float | None
    messages: float
    messages_averaging: float | None
    messages_averaging_paper: float | None
    bytes: float | None
    bytes_averaging: float | None

    @property
    def spectral_gap(self) -> float:
        """One minus `|lambda2|`."""
        return 1.0 - self.second_eigenvalue

    def _title(self) -> str:
        cliques_part = "" if self.num_cliques is None else f", {self.num_cliques} cliques"
        return f"{self.name}: {self.num_nodes:,} nodes{cliques_part}, {self.num_edges:,} edges"

    def _rows(self) -> list[tuple[str, str]]:
        sampled = self.distance_sources < self.num_nodes
        said = f", measured from {self.distance_sources:,} random nodes" if sampled else ""
        rows = [
            ("edges per node", f"{self.edges_per_node:.2f} ({self.min_edges} to {self.max_edges})"),
            ("|lambda2|", f"{self.second_eigenvalue:.5f} (spectral gap {self.spectral_gap:.3g})"),
            ("distance between nodes", f"{self.mean_distance:.2f} (diameter {self.diameter}{said})"),
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
        return rows

    def __str__(self) -> str:
        return "\n".join([self._title(), *(f"  {label:<28} {value}" for label, value in self._rows())])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td style='text-align:left'>{html.escape(label).replace('  ', '&emsp;')}</td>"
            f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
            for label, value in self._rows()
        )
        return f"<table><caption>{html.escape(self._title())}</caption>{rows}</table>"


def make_report(
    topology: Topology, label_distribution: npt.ArrayLike | None = None, *, num_parameters: int | None = None
) -> Report:
    """Measures a topology; `topology.report(...)` is the usual way to call this.

    Args:
      topology: any topology.
      label_distribution: p_i(y), `[nodes, classes]`; needed for the skews.
      num_parameters: size of the model, for the bytes that a node sends, at 4 bytes a parameter.
    """
    n, degrees, ids = topology.num_nodes, topology.degrees, topology.clique_ids
    clique_skews = neighbourhood_skews = None
    if label_distribution is not None:
        p = cliques.check_label_distribution(label_distribution)
        if len(p) != n:
            raise ValueError(f"label_distribution has {len(p)} rows, the topology {n} nodes")
        neighbourhoods = (topology.adjacency() @ p + p) / (degrees + 1)[:, None]
        neighbourhood_skews = np.abs(neighbourhoods - p.mean(axis=0)).sum(axis=1)
        if ids is not None:
            clique_skews = cliques.skew(ids, p)
    messages = float(degrees.mean())
    averaging = averaging_paper = None
    if topology.gradient_edges is not None:
        averaging = messages + 2 * len(topology.gradient_edges) / n
        averaging_paper = 2 * messages
    size = None if num_parameters is None else 4 * _checks.integer("num_parameters", num_parameters, 0)
    mean_distance, diameter, sources = _distances(topology)
    return Report(
        name=topology.name,
        num_nodes=n,
        num_edges=len(topology.edges),
        num_cliques=None if ids is None else int(ids.max()) + 1,
        edges_per_node=messages,
        min_edges=int(degrees.min()),
        max_edges=int(degrees.max()),
        second_eigenvalue=mixing.second_eigenvalue(mixing.metropolis_hastings(topology)),
        mean_distance=mean_distance,
        diameter=diameter,
        distance_sources=sources,
        clique_skew=None if clique_skews is None else float(clique_skews.mean()),
        max_clique_skew=None if clique_skews is None else float(clique_skews.max()),
        neighbourhood_skew=None if neighbourhood_skews is None else float(neighbourhood_skews.mean()),
        max_neighbourhood_skew=None if neighbourhood_skews is None else float(neighbourhood_skews.max()),
        messages=messages,
        messages_averaging=averaging,
        messages_averaging_paper=averaging_paper,
        bytes=None if size is None else messages * size,
        bytes_averaging=None if size is None or averaging is None else averaging * size,
    )


def _distances(topology: Topology) -> tuple[float, int, int]:
    """Mean distance of two distinct nodes, largest distance, and the number of nodes measured from."""
    n = topology.num_nodes
    if n == 1:
        return 0.0, 0, 1
    sources = np.random.default_rng(0).permutation(n)[:_MOST_SOURCES]
    distances = scipy.sparse.csgraph.shortest_path(topology.adjacency(), unweighted=True, indices=sources)
    return float(distances.sum() / (len(sources) * (n - 1))), int(distances.max()), len(sources)


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
