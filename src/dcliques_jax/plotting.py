"""Pictures of topologies, partitions and results.

Every function draws into the matplotlib axes `ax`, by default into a new figure, and returns the axes. New figures are
as wide as matplotlib's setting `figure.figsize`, lines as wide as `lines.linewidth`. Text and edges take the colours of
the axes, so pictures suit light and dark styles. `style` sets sizes for a paper, and `save` writes a file of them:

    with plotting.style("column"):
        axes = result.plot()
    plotting.save(axes, "accuracy.pdf")
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.sparse.csgraph

from dcliques_jax import _checks, cliques
from dcliques_jax.partitions import PartitionedDataset
from dcliques_jax.results import Result
from dcliques_jax.topologies import Topology

# Okabe and Ito's palette, without yellow, which is hard to see on white, and without grey, which looks like pink and
# green to colour-blind readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Dashes in line widths. Five styles and six colours have no common factor: curve i takes style i % 5 and colour i % 6,
# so neighbours differ in both, and the first 30 curves all differ.
LINE_STYLES: tuple[Any, ...] = (
    "solid",
    (0, (4, 1.5)),
    (0, (1, 1.2)),
    (0, (6, 1.5, 1, 1.5)),
    (0, (4, 1.2, 1, 1.2, 1, 1.2)),
)
# Petroff's ten (arXiv:2107.02270), for classes: about as far apart as ten can be, for colour-blind readers too.
CLASS_COLOURS = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
_WIDTHS = {"column": 3.3, "page": 6.9}  # inches, of a two-column paper
_TEXT_AS_TEXT: dict[Any, Any] = {"svg.fonttype": "none", "pdf.fonttype": 42, "ps.fonttype": 42}
_LEGEND = {"handlelength": 2.4, "columnspacing": 1.0}  # handles as short as dashes can be told apart in
_THIN = 0.4  # width of the lines of extremes, relative to that of means
# What the legend explains: thin lines, bands and triangles. Artists are labelled with it after an underscore, which
# keeps each of them out of the legend.
_EXTREMES = "min and max over nodes"
_SEEDS = "min and max over seeds"
_ZERO = "zero"
_MOST_PIES = 200  # nodes; in larger graphs pies would be too small to read
_MOST_BY_DISTANCE = 1500  # nodes to place by their distances, which takes time by the cube of their number
_MOST_EDGES = 20_000  # to draw; more take long, and cover the ground all the same


def style(size: str = "column") -> AbstractContextManager[None]:
    """Sizes for a paper: 8 pt text, 1.2 pt lines and figures as wide as a column or a page.

    The sizes hold for all that is created inside the `with` block, also by matplotlib itself. Other settings stay as
    they are. Combine it with a style of matplotlib to change those: `with plt.style.context("dark_background"),
    plotting.style("column"): ...`.

    Args:
      size: `"column"` for 3.3 inches, `"page"` for 6.9 inches.

    >>> from dcliques_jax import topologies
    >>> with style("column"):
    ...     axes = topologies.ring(10).plot()
    >>> float(axes.figure.get_figwidth())
    3.3
    """
    import matplotlib as mpl

    _checks.choice("size", size, tuple(_WIDTHS))
    texts = ("font.size", "figure.titlesize", "axes.titlesize", "axes.labelsize", "legend.fontsize")
    ticks = ("xtick.labelsize", "ytick.labelsize")
    width = _WIDTHS[size]
    settings: dict[Any, Any] = {"lines.linewidth": 1.2, "figure.figsize": (width, 2 / 3 * width)}
    return mpl.rc_context(settings | dict.fromkeys(texts + ticks, 8.0) | _TEXT_AS_TEXT)


def save(picture: Any, path: str | os.PathLike[str], **options: Any) -> None:
    """Writes a picture to a file in the format of its suffix, with text as text in PDF, SVG and EPS files.

    By default matplotlib writes outlines into SVG files and Type 3 fonts into PDF files: the former cannot be searched,
    the latter are refused by some publishers.

    Args:
      picture: matplotlib axes or figure.
      path: file to write.
      **options: passed on to matplotlib's `Figure.savefig`, such as `dpi=300`.

    >>> import pathlib, tempfile
    >>> from dcliques_jax import topologies
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder) / "ring.svg"
    ...     save(topologies.ring(10).plot(), path)
    ...     ">ring</text>" in path.read_text()
    True
    """
    import matplotlib as mpl

    with mpl.rc_context(_TEXT_AS_TEXT):
        picture.figure.savefig(path, **options)


def plot_topology(topology: Topology, label_distribution: npt.ArrayLike | None = None, *, ax: Any = None) -> Any:
    """Draws who talks to whom, and who has which labels.

    Cliques are small circles of nodes on a large circle; many of them zigzag around it, and those of a fractal are
    circles of circles. A node stands on the side of the cliques it is linked to. Edges inside cliques are the fainter
    ones. Without cliques, rings and complete graphs are circles, and rectangular grids are upright with the longer
    side across. In other graphs of up to 1,500 nodes near nodes are drawn near. Of more than 20,000 edges a random
    20,000 are drawn, and the title says so.

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
    ax = _axes(ax, 5 / 6)
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

    ax = _axes(ax, 3 / 7)
    image = ax.imshow(data.label_counts.T, aspect="auto", origin="lower", vmin=0, cmap="viridis")
    ax.set(xlabel="node", ylabel="label")
    ax.locator_params(integer=True)
    ax.figure.colorbar(image, ax=ax, label="examples", ticks=MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    return ax


def plot_accuracy(results: Mapping[str, Result], *, ax: Any = None, x: str = "epoch") -> Any:
    """Draws test accuracy over time, one colour and line style a result: mean over nodes bold, min and max thin.

    Of several seeds every line is the mean, and a band reaches from the seed with the lowest mean over nodes to the
    one with the highest: thin lines show how nodes differ, bands how seeds do.

    Args:
      results: results by the label they get in the legend.
      ax: matplotlib axes.
      x: what time is counted in, `"epoch"` or `"round"`.
    """
    return _plot_nodes(results, "accuracy", 100, "test accuracy (%)", ax, x)


def plot_loss(results: Mapping[str, Result], *, ax: Any = None, x: str = "epoch") -> Any:
    """Draws test loss over time, with the lines, bands and arguments of `plot_accuracy`."""
    return _plot_nodes(results, "loss", 1, "test loss", ax, x)


def plot_consensus(results: Mapping[str, Result], *, ax: Any = None) -> Any:
    """Draws the distance of models from their mean over epochs, on a logarithmic axis.

    A distance of exactly zero, such as that of equal models before training, is a triangle at the bottom of the axes.
    Of several seeds the mean is drawn, and a band from the lowest to the highest. `results` are by their label.
    """
    _check_mapping(results, "result")
    new, ax = ax is None, _axes(ax, 2 / 3)
    for label, result, look in _looks(results, ax):
        history = result.history
        distance = history.consensus_distance.reshape(-1, len(history.epoch))
        apart = (distance > 0).any(axis=0)
        _curve(ax, history.epoch, np.where(apart, distance, np.nan), look, label)
        if not apart.all():
            below = {"transform": ax.get_xaxis_transform(), "clip_on": False, "label": f"_{_ZERO}"}
            ax.plot(history.epoch[~apart], np.zeros((~apart).sum()), "v", color=look.colour, **below)
    ax.set_yscale("log")
    return _finish(ax, "epochs", "consensus distance", new)


def plot_accuracy_per_message(
    results: Mapping[str, Result], *, messages: Mapping[str, float] | None = None, ax: Any = None
) -> Any:
    """Draws mean test accuracy against the messages a node has sent so far, on a logarithmic axis.

    `dsgd` sends one message over every edge in a round and, if gradients are averaged, one more over every edge that
    they travel, as `topology.report()` counts. Bands are over seeds.

    Args:
      results: results by the label they get in the legend.
      messages: messages per node and round by label. Needed for algorithms whose `Traits` do not tell what they send.
      ax: matplotlib axes.
    """
    _check_mapping(results, "result")
    given = messages or {}
    if unknown := set(given) - set(results):
        raise ValueError(f"messages are given for {sorted(unknown)}, but the results are {list(results)}")
    rates = {label: given[label] if label in given else _messages(label, result) for label, result in results.items()}
    new, ax = ax is None, _axes(ax, 2 / 3)
    for label, result, look in _looks(results, ax):
        sent = result.history.round * rates[label]
        percent = 100 * _by_seed(result.history.accuracy)
        _curve(ax, sent[sent > 0], percent.mean(axis=2)[:, sent > 0], look, label)
    ax.set_xscale("log")
    return _finish(ax, "messages sent per node", "test accuracy (%)", new)


def plot_per_class(result: Result, name: str = "per_class_accuracy", *, ax: Any = None) -> Any:
    """Draws which node has forgotten which class: the accuracy of every node on every class at the last evaluation.

    Nodes are rows, clique by clique with a gap between cliques if the topology has any. Of several seeds the mean is
    drawn. Classes without examples stay blank.

    Args:
      result: a result of `simulate(metrics={name: metrics.per_class_accuracy(model)})`.
      name: the name of the metric, `[t, nodes, classes]`.
      ax: matplotlib axes.
    """
    from matplotlib.ticker import FuncFormatter

    nodes, values = _per_class(result, name)
    ids = None if isinstance(result.topology, list) else result.topology.clique_ids
    if ids is not None:
        order = np.argsort(ids[nodes], kind="stable")
        nodes, values = nodes[order], values[order]
    ax = _axes(ax, 5 / 7)
    image = ax.imshow(100 * values, aspect="auto", vmin=0, vmax=100, cmap="viridis", interpolation="none")
    if ids is not None:
        gaps = np.flatnonzero(np.diff(ids[nodes])) + 0.5
        ax.hlines(gaps, -0.5, values.shape[1] - 0.5, colors=[ax.get_facecolor()], linewidths=_line_width())
    ax.set(xlabel="class", ylabel="node" if ids is None else "node, clique by clique")
    ax.locator_params(integer=True)
    ax.yaxis.set_major_formatter(
        FuncFormatter(lambda row, _: str(nodes[int(row)]) if 0 <= row < len(nodes) and row == int(row) else "")
    )
    ax.figure.colorbar(image, ax=ax, label="accuracy (%)")
    return ax


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
    new, ax = ax is None, _axes(ax, 2 / 3)
    bins = np.linspace(0, max(0.1, *(values.max() for values in skews.values())), 31)
    for label, values, look in _looks(skews, ax):
        percent = np.full(len(values), 100 / len(values))
        edge = {"edgecolor": look.colour, "linestyle": look.style, "linewidth": _line_width()}
        ax.hist(values, bins, weights=percent, label=label, histtype="stepfilled", facecolor=(look.colour, 0.4), **edge)
    return _finish(ax, "skew of a clique", "cliques (%)", new)


def place_legend(ax: Any, *, grow: bool = False) -> None:
    """Draws the legend where it covers no curve: inside the axes if there is room, else below them.

    The functions of this module do so. Call it again after you changed the limits or the size of the axes. Axes also
    change in size when you draw into others of the same figure.

    Args:
      ax: matplotlib axes with labelled curves.
      grow: whether a legend below the axes makes the figure higher. Otherwise the axes become lower.
    """
    figure = ax.figure.figure  # the whole one, also of axes in a subfigure
    handles, labels = ax.get_legend_handles_labels()
    handles = [*handles, *_notes(ax)]
    labels = [*labels, *(note.get_label() for note in handles[len(labels) :])]
    legend = ax.legend(handles, labels, **_LEGEND)
    legend.set_in_layout(False)  # inside the axes it takes no room
    figure.draw_without_rendering()  # what covers what depends on the layout
    if not _covers(legend, ax):
        return
    _legend_below(ax, handles, labels)
    height = ax.get_legend().get_window_extent().height / figure.dpi
    if grow:
        figure.set_figheight(figure.get_figheight() + height)
    elif figure.get_layout_engine() is None:  # which would make room
        figure.draw_without_rendering()
        missing = 0.01 - ax.get_legend().get_window_extent().y0 / figure.bbox.height
        if missing > 0:
            figure.subplots_adjust(bottom=figure.subplotpars.bottom + missing)


class _Look(NamedTuple):
    colour: str
    style: Any  # a line style of matplotlib


def _axes(ax: Any, aspect: float) -> Any:
    """The given axes, or those of a new figure whose height is its width times `aspect`."""
    import matplotlib.pyplot as plt

    width = plt.rcParams["figure.figsize"][0]
    return plt.subplots(figsize=(width, aspect * width), layout="constrained")[1] if ax is None else ax


def _line_width() -> float:
    import matplotlib as mpl

    return float(mpl.rcParams["lines.linewidth"])


def _finish(ax: Any, xlabel: str, ylabel: str, new: bool) -> Any:
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.grid(alpha=0.25)
    place_legend(ax, grow=new)
    return ax


def _notes(ax: Any) -> list[Any]:
    """Legend entries that explain what is drawn in the axes besides the labelled curves."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    ink, present = ax.xaxis.label.get_color(), {artist.get_label() for artist in (*ax.lines, *ax.collections)}
    notes = (
        Line2D([], [], color=ink, linewidth=_THIN * _line_width(), label=_EXTREMES),
        Patch(facecolor=ink, alpha=0.3, label=_SEEDS),
        Line2D([], [], color=ink, marker="v", linestyle="none", label=_ZERO),
    )
    return [note for note in notes if f"_{note.get_label()}" in present]


def _covers(legend: Any, ax: Any) -> bool:
    """Whether a legend hides a part of a curve, a band or a histogram, or does not fit into the axes."""
    box, room = legend.get_window_extent().padded(2), ax.bbox
    if box.width > room.width or box.height > room.height:
        return True
    curves = [line.get_transform().transform_path(line.get_path()) for line in ax.lines]
    shapes = [patch.get_transform().transform_path(patch.get_path()) for patch in ax.patches]
    shapes += [each.get_transform().transform_path(path) for each in ax.collections for path in each.get_paths()]
    hidden = [path.cleaned(remove_nans=True).intersects_bbox(box, filled=False) for path in curves]
    return any(hidden) or any(path.intersects_bbox(box) for path in shapes)


def _legend_below(ax: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Centres the legend under the axes and their labels, in as many columns as are not wider than these."""
    from matplotlib.transforms import ScaledTranslation

    # Distances from the axes are in inches: they stay right when the layout changes the size of the axes.
    dpi, inner, outer = ax.figure.dpi, ax.bbox, ax.get_tightbbox()
    centre, bottom = (outer.x0 + outer.x1 - inner.x0 - inner.x1) / 2, outer.y0 - inner.y0
    under = ax.transAxes + ScaledTranslation(centre / dpi, bottom / dpi, ax.figure.dpi_scale_trans)
    for columns in range(min(4, len(handles)), 0, -1):
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": under, "borderaxespad": 0.3}
        legend = ax.legend(handles, labels, ncols=columns, **_LEGEND, **place)
        if legend.get_window_extent().width <= outer.width:
            return


def _check_mapping(by_label: Any, what: str) -> None:
    if not isinstance(by_label, Mapping) or not by_label:
        raise ValueError(f"there is no {what} to draw in {by_label!r}: pass a mapping such as {{'label': {what}}}")


def _looks(by_label: Mapping[str, Any], ax: Any) -> Iterator[tuple[str, Any, _Look]]:
    """Labels and what they stand for with a look each; looks go on after those in use."""
    drawn = len(ax.get_legend_handles_labels()[1])
    for number, (label, value) in enumerate(by_label.items(), start=drawn):
        yield label, value, _Look(COLOURS[number % len(COLOURS)], LINE_STYLES[number % len(LINE_STYLES)])


def _by_seed(values: np.ndarray) -> np.ndarray:
    """Values [t, nodes] of one seed or [seeds, t, nodes] of several, as the latter."""
    return values.reshape(-1, *values.shape[-2:])


def _plot_nodes(results: Mapping[str, Result], field: str, scale: float, ylabel: str, ax: Any, x: str) -> Any:
    """Draws a field [t, nodes] of histories over time: its mean over nodes bold, its extremes thin."""
    _checks.choice("x", x, ("epoch", "round"))
    _check_mapping(results, "result")
    new, ax = ax is None, _axes(ax, 2 / 3)
    for label, result, look in _looks(results, ax):
        time, values = getattr(result.history, x), scale * _by_seed(getattr(result.history, field))
        _curve(ax, time, values.mean(axis=2), look, label)
        for extreme in (values.min(axis=2), values.max(axis=2)):
            thin = {"linewidth": _THIN * _line_width(), "label": f"_{_EXTREMES}"}
            ax.plot(time, extreme.mean(axis=0), color=look.colour, linestyle=look.style, **thin)
    return _finish(ax, f"{x}s", ylabel, new)


def _curve(ax: Any, x: np.ndarray, values: np.ndarray, look: _Look, label: str) -> None:
    """The mean of values [seeds, t] over seeds, and a band from the lowest to the highest."""
    ax.plot(x, values.mean(axis=0), color=look.colour, linestyle=look.style, label=label)
    if len(values) > 1:
        band = {"alpha": 0.3, "linewidth": 0, "label": f"_{_SEEDS}"}
        ax.fill_between(x, values.min(axis=0), values.max(axis=0), color=look.colour, **band)


def _messages(label: str, result: Result) -> float:
    """Messages that a node sends in a round, the mean over topologies if there are several."""
    if (told := result.provenance.get("messages_per_round")) is not None:
        return float(told)
    raise ValueError(
        f"the algorithm of result {label!r} does not tell what it sends: pass the messages per node and round, "
        f"messages={{{label!r}: ...}}, or give the algorithm Traits(sends=...)"
    )


def _per_class(result: Result, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The evaluated nodes, and their accuracy on every class at the last evaluation `[nodes, classes]`."""
    if not isinstance(result, Result):
        raise ValueError(f"there is no result to draw in {result!r}: pass what simulate returned")
    history = result.history
    if name not in history.extra:
        raise ValueError(
            f"the result has no metric {name!r} among {list(history.extra)}: pass its name, or measure it with "
            f"simulate(metrics={{{name!r}: metrics.per_class_accuracy(model)}})"
        )
    values, nodes = history.extra[name], history.eval_nodes
    if values.shape[:-1] != history.accuracy.shape:
        raise ValueError(f"metric {name!r} has shape {values.shape}: pass the name of one that is [t, nodes, classes]")
    nodes = nodes.reshape(-1, nodes.shape[-1])
    if (nodes != nodes[0]).any():
        raise ValueError("other nodes were evaluated for every seed: pass simulate(eval_nodes=...) a list of nodes")
    last = values.reshape(-1, *values.shape[-3:])[:, -1]  # [seeds, nodes, classes]
    counts = np.isfinite(last).sum(axis=0)
    total = np.where(np.isfinite(last), last, 0).sum(axis=0)
    return nodes[0], np.divide(total, counts, out=np.full(total.shape, np.nan), where=counts > 0)


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
    if (places := _places_in_grid(topology)) is not None:
        return places
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


def _places_in_grid(topology: Topology) -> tuple[np.ndarray, float] | None:
    """Places in upright rows and columns if the graph is a rectangular grid with corners, else None."""
    n, corners = topology.num_nodes, np.flatnonzero(topology.degrees == 2)
    if len(corners) != 4 or n == 4:
        return None
    first = corners[0]
    from_first = scipy.sparse.csgraph.shortest_path(topology.adjacency(), unweighted=True, indices=first)
    second = corners[np.argsort(from_first[corners])[2]]  # the corner at the other end of the longer side
    from_second = scipy.sparse.csgraph.shortest_path(topology.adjacency(), unweighted=True, indices=second)
    side = from_first[second]
    places = np.stack([from_first - from_second + side, side - from_first - from_second], axis=1) / 2
    shape = np.ptp(places, axis=0) + 1
    # Distinct places that fill a rectangle, and as many edges as it has, all between next ones: a grid and no other.
    grid_edges = 2 * n - shape.sum()
    if shape.prod() != n or len(np.unique(places, axis=0)) != n or len(topology.edges) != grid_edges:
        return None
    if (np.abs(np.diff(places[topology.edges], axis=1)).sum(axis=2) != 1).any():
        return None
    places -= places.mean(axis=0)
    radius = 0.33 / (np.linalg.norm(places, axis=1).max() + 0.33)
    return places * radius / 0.33, radius


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
