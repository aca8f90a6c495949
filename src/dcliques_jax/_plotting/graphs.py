"""Draws nodes, their labels and their links."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dcliques_jax import _edges, cliques
from dcliques_jax._plotting import positions as positions_lib
from dcliques_jax._plotting.style import CLASS_COLOURS, COLOURS
from dcliques_jax._topologies.topology import arcs_of
from dcliques_jax.topologies import Topology

_MOST_PIES = 200  # nodes; in larger graphs pies are too small to read
_MOST_EDGES = 20_000  # to draw; more take long and show nothing new
_LONGEST_HEAD = 0.07  # of arrows, where nodes are in the unit circle
_HEAD = 1.3  # length of arrowheads relative to the radius of nodes


class Nodes(NamedTuple):
    """How nodes are drawn, in every panel alike."""

    positions: np.ndarray  # [nodes, 2]
    radius: float  # of a node
    groups: np.ndarray  # [nodes] edges inside a group are fainter
    shares: np.ndarray  # [nodes, colours] the slices of each node
    colours: list[Any]


class Links(NamedTuple):
    """The links of a panel."""

    edges: np.ndarray  # [edges, 2]
    arcs: np.ndarray | None  # [arcs, 2] (sender, receiver) of arrows, None if every edge carries both ways


def place(topology: Topology, label_distribution: npt.ArrayLike | None) -> Nodes:
    """Chooses where nodes are and what they look like."""
    n = topology.num_nodes
    shares, colours = np.ones((n, 1)), list[Any](COLOURS[:1])
    if label_distribution is not None:
        shares = cliques.check_label_distribution(label_distribution)
        if len(shares) != n:
            raise ValueError(f"label_distribution has {len(shares)} rows, the topology {n} nodes")
        colours = class_colours(shares.shape[1])
        if n > _MOST_PIES:
            shares = np.eye(shares.shape[1])[shares.argmax(axis=1)]
    positions, room = positions_lib.node_positions(topology)
    groups = np.arange(n) if topology.clique_ids is None else topology.clique_ids
    return Nodes(positions, min(room, 0.1), groups, shares, colours)


def all_links(topology: Topology) -> Links:
    """Returns the links of all rounds together; of graphs that are drawn at random, those of one."""
    if topology.drawn:
        return links_of_round(topology, 0)
    return Links(topology.edges, topology.arcs)


def links_of_round(topology: Topology, turn: int) -> Links:
    """Returns the links that a round of a topology with own matrices uses."""
    assert topology.matrices is not None
    arcs = arcs_of(topology.matrices[turn : turn + 1])
    edges = _edges.in_order(topology.num_nodes, arcs)
    return Links(edges, None if len(arcs) == 2 * len(edges) else arcs)


def draw(ax: Any, nodes: Nodes, links: Links, title: str) -> None:
    """Draws a graph into axes."""
    from matplotlib.collections import LineCollection, PatchCollection
    from matplotlib.patches import Wedge

    edges, arcs, positions, ink = links.edges, links.arcs, nodes.positions, ax.xaxis.label.get_color()
    if len(edges) > _MOST_EDGES:
        title += f", {_MOST_EDGES:,} of {len(edges):,} edges"
        edges = edges[np.random.default_rng(0).choice(len(edges), _MOST_EDGES, replace=False)]
        arcs = None
    inside = nodes.groups[edges[:, 0]] == nodes.groups[edges[:, 1]]
    for lines, strength in ((positions[edges[inside]], 0.25), (positions[edges[~inside]], 0.5)):
        length = np.linalg.norm(lines[:, 0] - lines[:, 1], axis=1).sum()
        alpha = strength / np.sqrt(max(1.0, length / 40))  # else many long lines make a black disc
        ax.add_collection(LineCollection(lines, colors=ink, linewidths=0.7, alpha=alpha, zorder=1))
    if arcs is not None:
        _draw_heads(ax, nodes, arcs)
    ends = 360 * np.cumsum(nodes.shares, axis=1)
    starts = ends - 360 * nodes.shares
    slices = np.argwhere(nodes.shares > 0)
    wedges = [Wedge(positions[i], nodes.radius, starts[i, label], ends[i, label]) for i, label in slices]
    fill = [nodes.colours[label] for _, label in slices]
    ax.add_collection(PatchCollection(wedges, facecolors=fill, linewidths=0, zorder=2))
    ax.set(xlim=(-1.02, 1.02), ylim=(-1.02, 1.02), aspect="equal", title=title)
    ax.set_axis_off()


def _draw_heads(ax: Any, nodes: Nodes, arcs: np.ndarray) -> None:
    """Draws an arrowhead at the receiver of every arc, with its tip at the edge of the node."""
    from matplotlib.collections import PolyCollection

    start, end = nodes.positions[arcs[:, 0]], nodes.positions[arcs[:, 1]]
    length = np.maximum(np.linalg.norm(end - start, axis=1, keepdims=True), 1e-9)
    along = (end - start) / length
    across = np.stack([-along[:, 1], along[:, 0]], axis=1)
    size = np.minimum(min(_LONGEST_HEAD, _HEAD * nodes.radius), 0.6 * np.maximum(length - 2 * nodes.radius, 0))
    tip = end - nodes.radius * along
    heads = np.stack([tip, tip - size * (along - 0.35 * across), tip - size * (along + 0.35 * across)], axis=1)
    look = {"facecolors": [ax.xaxis.label.get_color()], "alpha": 0.7 / np.sqrt(max(1.0, len(arcs) / 200))}
    ax.add_collection(PolyCollection(list(heads), linewidths=0, zorder=1.5, **look))


def class_colours(count: int) -> list[Any]:
    """Chooses a colour per class. With more than ten classes, neighbouring classes have similar colours."""
    import matplotlib as mpl

    if count <= len(CLASS_COLOURS):
        return list(CLASS_COLOURS[:count])
    return list(mpl.colormaps["viridis"](np.linspace(0.15, 1, count)))


def label_bar(axes: Any, colours: Sequence[Any]) -> None:
    """Draws a colour bar with one field per class beside one or several axes."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    count = len(colours)
    fields = ScalarMappable(BoundaryNorm(np.arange(count + 1) - 0.5, count), ListedColormap(colours))
    several = np.ndim(axes) > 0
    size: dict[str, Any] = {"shrink": 0.9, "aspect": 12} if several else {"shrink": 0.7}
    figure = np.ravel(axes)[0].figure
    bar = figure.colorbar(fields, ax=axes, label="label", ticks=np.arange(0, count, -(-count // 20)), **size)
    bar.minorticks_off()
    if several:
        bar.ax.tick_params(labelsize="x-small")
    bar.ax.tick_params(length=0)
