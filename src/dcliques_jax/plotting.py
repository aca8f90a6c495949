"""Pictures of topologies, partitions and results.

Every function draws into the matplotlib axes `ax`, by default into a new figure, and returns the axes. Text and edges
take the colours of the axes: pictures suit light and dark styles alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse.csgraph

from dcliques_jax import _checks, cliques, mixing
from dcliques_jax.partitions import PartitionedDataset
from dcliques_jax.results import Result
from dcliques_jax.topologies import Topology

# Okabe and Ito's palette, without its yellow: told apart by colour-blind readers, on white and on dark grounds.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")
# Petroff's ten (arXiv:2107.02270), for classes: about as far apart as ten can be, for colour-blind readers too.
CLASS_COLOURS = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
_MOST_PIES = 200  # nodes; in larger graphs pies would be too small to read
_MOST_BY_DISTANCE = 1500  # nodes to place by their distances, which takes time by the cube of their number
_MOST_EDGES = 20_000  # to draw; more take long, and cover the ground all the same


def plot_topology(topology: Topology, label_distribution: npt.ArrayLike | None = None, *, ax: Any = None) -> Any:
    """Draws who talks to whom, and who has which labels.

    Cliques are small circles of nodes on a large circle; many of them zigzag around it, and those of a fractal are
    circles of circles. A node stands on the side of the cliques it is linked to. Edges inside cliques are the fainter
    ones. Without cliques, rings and complete graphs are circles; in other graphs of up to 1,500 nodes near nodes are
    drawn near. Of more than 20,000 edges a random 20,000 are drawn, and the title says so.

    Args:
      topology: any topology.
      label_distribution: p_i(y), `[nodes, classes]`. Up to 200 nodes become pies of their labels; more become dots in
        the colour of their most frequent label.
      ax: matplotlib axes.
    """
    from matplotlib.collections import LineCollection, PatchCollection
    from matplotlib.patches import Wedge

    n = topology.num_nodes
    shares, colours = np.ones((n, 1)), list[Any](COLOURS[:1])
    if label_distribution is not None:
        shares = cliques.check_label_distribution(label_distribution)
        if len(shares) != n:
            raise ValueError(f"label_distribution has {len(shares)} rows, the topology {n} nodes")
        colours = _class_colours(shares.shape[1])
        if n > _MOST_PIES:
            shares = np.eye(shares.shape[1])[shares.argmax(axis=1)]
    edges, title = topology.edges, topology.name
    if len(edges) > _MOST_EDGES:
        title += f", {_MOST_EDGES:,} of {len(edges):,} edges"
        edges = edges[np.random.default_rng(0).choice(len(edges), _MOST_EDGES, replace=False)]
    places, room = _places(topology)
    radius = min(room, 0.1)
    ax = _axes(ax, (6, 5) if n <= _MOST_PIES else (9, 8))
    ink = ax.xaxis.label.get_color()
    ids = np.arange(n) if topology.clique_ids is None else topology.clique_ids
    inside = ids[edges[:, 0]] == ids[edges[:, 1]]
    for lines, strength in ((places[edges[inside]], 0.25), (places[edges[~inside]], 0.5)):
        length = np.linalg.norm(lines[:, 0] - lines[:, 1], axis=1).sum()
        alpha = strength / np.sqrt(max(1.0, length / 40))  # many long lines would make a black disc
        ax.add_collection(LineCollection(lines, colors=ink, linewidths=0.7, alpha=alpha, zorder=1))
    ends = 360 * np.cumsum(shares, axis=1)
    slices = np.argwhere(shares > 0)
    wedges = [Wedge(places[i], radius, ends[i, label] - 360 * shares[i, label], ends[i, label]) for i, label in slices]
    fill = [colours[label] for _, label in slices]
    ax.add_collection(PatchCollection(wedges, facecolors=fill, linewidths=0, zorder=2))
    ax.set(xlim=(-1.02, 1.02), ylim=(-1.02, 1.02), aspect="equal", title=title)
    ax.set_axis_off()
    if label_distribution is not None:
        _label_bar(ax, colours)
    return ax


def plot_partition(data: PartitionedDataset, *, ax: Any = None) -> Any:
    """Draws how many examples of each label every node holds."""
    from matplotlib.ticker import MaxNLocator

    ax = _axes(ax, (7, 3))
    image = ax.imshow(data.label_counts.T, aspect="auto", origin="lower", vmin=0, cmap="viridis")
    ax.set(xlabel="node", ylabel="label")
    ax.locator_params(integer=True)
    ax.figure.colorbar(image, ax=ax, label="examples", ticks=MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    return ax


def plot_accuracy(results: Mapping[str, Result], *, ax: Any = None, x: str = "epoch") -> Any:
    """Draws test accuracy over time, one colour a result: mean over nodes bold, minimum and maximum thin.

    Of several seeds every line is the mean, and a band reaches from the seed with the lowest mean over nodes to the
    one with the highest: thin lines show how nodes differ, bands how seeds do.

    Args:
      results: results by the label they get in the legend.
      ax: matplotlib axes.
      x: what time is counted in, `"epoch"` or `"round"`.
    """
    _checks.choice("x", x, ("epoch", "round"))
    _check_mapping(results, "result")
    ax = _axes(ax, (6, 4))
    for label, result, colour in _coloured(results, ax):
        time, percent = getattr(result.history, x), _percent(result)
        _curve(ax, time, percent.mean(axis=2), colour, label)
        for extreme in (percent.min(axis=2), percent.max(axis=2)):
            ax.plot(time, extreme.mean(axis=0), color=colour, linewidth=0.8)
    return _finish(ax, f"{x}s", "test accuracy (%)")


def plot_consensus(results: Mapping[str, Result], *, ax: Any = None) -> Any:
    """Draws the distance of models from their mean over epochs, on a logarithmic axis that leaves out exact zeros.

    Of several seeds the mean is drawn, and a band from the lowest to the highest. `results` are by their label.
    """
    _check_mapping(results, "result")
    ax = _axes(ax, (6, 4))
    for label, result, colour in _coloured(results, ax):
        history = result.history
        distance = history.consensus_distance.reshape(-1, len(history.epoch))
        apart = (distance > 0).all(axis=0)
        _curve(ax, history.epoch[apart], distance[:, apart], colour, label)
    ax.set_yscale("log")
    return _finish(ax, "epochs", "consensus distance")


def plot_accuracy_per_message(
    results: Mapping[str, Result], *, messages: Mapping[str, float] | None = None, ax: Any = None
) -> Any:
    """Draws mean test accuracy against the messages a node has sent so far, on a logarithmic axis.

    Messages are counted as `topology.report()` counts them: one for every edge of a node in a round and, if gradients
    were averaged, one more for every edge that they travel. Bands are over seeds.

    Args:
      results: results by the label they get in the legend.
      messages: messages per node and round by label, for algorithms that send others than `dsgd` does and for loaded
        results, which do not tell whether gradients were averaged.
      ax: matplotlib axes.
    """
    _check_mapping(results, "result")
    given = messages or {}
    if unknown := set(given) - set(results):
        raise ValueError(f"messages are given for {sorted(unknown)}, but the results are {list(results)}")
    rates = {label: given[label] if label in given else _messages(label, result) for label, result in results.items()}
    ax = _axes(ax, (6, 4))
    for label, result, colour in _coloured(results, ax):
        sent = result.history.round * rates[label]
        _curve(ax, sent[sent > 0], _percent(result).mean(axis=2)[:, sent > 0], colour, label)
    ax.set_xscale("log")
    return _finish(ax, "messages sent per node", "test accuracy (%)")


def plot_skew(
    label_distribution: npt.ArrayLike, clique_ids_by_name: Mapping[str, npt.ArrayLike], *, ax: Any = None
) -> Any:
    """Draws histograms of the skew of cliques, for example of random ones and of those by Greedy Swap.

    Args:
      label_distribution: p_i(y), `[nodes, classes]`.
      clique_ids_by_name: clique ids `[nodes]`, or those of several experiments `[experiments, nodes]`, by the label
        they get in the legend.
      ax: matplotlib axes.
    """
    _check_mapping(clique_ids_by_name, "clique_ids")
    skews = {
        name: np.concatenate([cliques.skew(ids, label_distribution) for ids in np.atleast_2d(several)])
        for name, several in clique_ids_by_name.items()
    }
    ax = _axes(ax, (6, 4))
    bins = np.linspace(0, max(0.1, *(values.max() for values in skews.values())), 31)
    for label, values, colour in _coloured(skews, ax):
        percent = np.full(len(values), 100 / len(values))
        style = {"histtype": "stepfilled", "facecolor": (colour, 0.4), "edgecolor": colour, "linewidth": 1.5}
        ax.hist(values, bins, weights=percent, label=label, **style)
    return _finish(ax, "skew of a clique", "cliques (%)")


def _axes(ax: Any, figsize: tuple[float, float]) -> Any:
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=figsize, layout="constrained")[1] if ax is None else ax


def _finish(ax: Any, xlabel: str, ylabel: str) -> Any:
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.grid(alpha=0.25)
    ax.legend()
    return ax


def _check_mapping(by_label: Any, what: str) -> None:
    if not isinstance(by_label, Mapping) or not by_label:
        raise ValueError(f"there is no {what} to draw in {by_label!r}: pass a mapping such as {{'label': {what}}}")


def _coloured(by_label: Mapping[str, Any], ax: Any) -> Iterator[tuple[str, Any, str]]:
    """Labels and what they stand for with a colour each; colours go on after those in use."""
    drawn = len(ax.get_legend_handles_labels()[1])
    for number, (label, value) in enumerate(by_label.items(), start=drawn):
        yield label, value, COLOURS[number % len(COLOURS)]


def _percent(result: Result) -> np.ndarray:
    """Accuracy as [seeds, t, nodes], of one seed or of several."""
    accuracy = result.history.accuracy
    return 100 * accuracy.reshape(-1, *accuracy.shape[-2:])


def _curve(ax: Any, x: np.ndarray, values: np.ndarray, colour: str, label: str) -> None:
    """The mean of values [seeds, t] over seeds, and a band from the lowest to the highest."""
    ax.plot(x, values.mean(axis=0), color=colour, linewidth=2.5, label=label)
    if len(values) > 1:
        ax.fill_between(x, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.3, linewidth=0)


def _messages(label: str, result: Result) -> float:
    """Messages that a node sends in a round, the mean over topologies if there are several."""
    graphs = result.topology if isinstance(result.topology, list) else [result.topology]
    reports = [graph.report() for graph in graphs]
    averaging = getattr(getattr(result.state, "algorithm", None), "gradient_weights", None)
    cliques = None if graphs[0].gradient_edges is None else mixing.clique_average(graphs[0])
    if isinstance(averaging, mixing.Identity) or (averaging is None and cliques is None):
        return float(np.mean([report.messages for report in reports]))
    if averaging is None or type(averaging) is not type(cliques):
        raise ValueError(
            f"result {label!r} does not tell over whom gradients were averaged: pass its messages per node and round, "
            f"messages={{{label!r}: {reports[0].messages_averaging or reports[0].messages:g}}} if over cliques and "
            f"{reports[0].messages:g} if not at all"
        )
    return float(np.mean([report.messages_averaging for report in reports]))


def _class_colours(count: int) -> list[Any]:
    """A colour for each class; beyond ten, neighbouring classes have similar ones."""
    import matplotlib as mpl

    if count <= len(CLASS_COLOURS):
        return list(CLASS_COLOURS[:count])
    return list(mpl.colormaps["viridis"](np.linspace(0.15, 1, count)))


def _label_bar(ax: Any, colours: Sequence[Any]) -> None:
    """A colour bar with a field for each class."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm, ListedColormap

    count = len(colours)
    fields = ScalarMappable(BoundaryNorm(np.arange(count + 1) - 0.5, count), ListedColormap(colours))
    bar = ax.figure.colorbar(fields, ax=ax, label="label", ticks=np.arange(0, count, -(-count // 20)), shrink=0.7)
    bar.minorticks_off()
    bar.ax.tick_params(length=0)


def _places(topology: Topology) -> tuple[np.ndarray, float]:
    """Where nodes are drawn, [nodes, 2] in the unit circle, and the radius that they have room for."""
    n, degrees = topology.num_nodes, topology.degrees
    if topology.clique_ids is not None:
        return _places_in_cliques(topology, topology.clique_ids)
    if n <= _MOST_BY_DISTANCE and (degrees != 2).any() and (degrees != n - 1).any():
        return _places_by_distance(topology)
    circle, radius = _circle(n, 1.0)
    order = scipy.sparse.csgraph.depth_first_order(topology.adjacency(), 0, return_predecessors=False)
    return circle[np.argsort(order)], radius


def _places_in_cliques(topology: Topology, ids: np.ndarray) -> tuple[np.ndarray, float]:
    from scipy.optimize import linear_sum_assignment

    count, sizes = int(ids.max()) + 1, np.bincount(ids)
    # A fractal groups as many cliques as a clique has nodes, then as many groups, and so on.
    base = max(2, int(sizes.max())) if "(fractal)" in topology.name else count
    centres, radius = _nested_circles(count, base)
    first, second = np.concatenate([topology.edges, topology.edges[:, ::-1]]).T
    pull = np.zeros((len(ids), 2))  # of each node towards the cliques it is linked to
    np.add.at(pull, first, centres[ids[second]] - centres[ids[first]])
    places, node_radius = np.empty((len(ids), 2)), radius
    for clique in range(count):
        circle, fits = _circle(int(sizes[clique]), radius)
        members = np.flatnonzero(ids == clique)
        nodes, spots = linear_sum_assignment(pull[members] @ circle.T, maximize=True)
        places[members[nodes]] = centres[clique] + circle[spots]
        node_radius = min(node_radius, fits)
    return places, node_radius


def _nested_circles(count: int, base: int) -> tuple[np.ndarray, float]:
    """Places in circles of `base`, these again in circles of `base` and so on, and the radius of what fits there."""
    if count <= base:
        return _circle(count, 1.0, most=30)
    outer, radius = _nested_circles(-(-count // base), base)
    inner, fits = _circle(base, radius)
    return (outer[:, None] + inner).reshape(-1, 2)[:count], fits


def _circle(count: int, radius: float, most: int = 150) -> tuple[np.ndarray, float]:
    """Places on a circle, and the radius of what fits there and into a circle of the given radius.

    More than `most` things zigzag between concentric circles, which leaves them more room.
    """
    if count == 1:
        return np.zeros((1, 2)), radius
    rows = -(-count // most)
    fits = 0.8 * np.sin(np.pi * rows / count)  # next to others in the innermost row, if that has radius 1
    innermost = radius / (1 + fits * (2.2 * rows - 1.2))
    circles = innermost * (1 + 2.2 * fits * (np.arange(count) % rows))
    angles = np.pi / 2 - 2 * np.pi * np.arange(count) / count
    return circles[:, None] * np.stack([np.cos(angles), np.sin(angles)], axis=1), innermost * fits


def _places_by_distance(topology: Topology) -> tuple[np.ndarray, float]:
    """Places whose distances follow those in the graph: stress majorisation, from classical scaling on."""
    from scipy.spatial.distance import cdist

    distances = scipy.sparse.csgraph.shortest_path(topology.adjacency(), unweighted=True)
    n, squares = len(distances), distances**2
    centred = squares.mean(axis=0) + squares.mean(axis=1)[:, None] - squares - squares.mean()
    places = np.random.default_rng(0).normal(size=(n, 2))
    for _ in range(50):  # towards the first two eigenvectors; where it stops short of them does not matter
        places = np.linalg.qr(centred @ places)[0]
    places *= np.sqrt(np.linalg.norm(centred @ places, axis=0))
    weights = 1 / (squares + np.eye(n)) - np.eye(n)  # long distances count less, as in Kamada and Kawai's layout
    solve = np.linalg.inv(np.diag(weights.sum(axis=1)) - weights + 1 / n)
    wanted = weights * distances
    for _ in range(30):
        ratios = wanted / np.maximum(cdist(places, places), 1e-9)
        places = solve @ (places * ratios.sum(axis=1)[:, None] - ratios @ places)
    places -= places.mean(axis=0)
    places /= np.linalg.norm(places, axis=1).max()
    apart = cdist(places, places) + 2 * np.eye(n)
    radius = 0.33 * float(np.median(apart.min(axis=1)))
    return places * (1 - radius), radius
