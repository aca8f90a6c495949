"""Pictures of topologies, partitions and results.

Every function draws into the matplotlib axes `ax`, by default those of a new figure, and returns the axes. The width of
new figures is matplotlib's setting `figure.figsize`, that of lines is `lines.linewidth`. Text and edges have the
colours of the axes, so pictures suit light and dark styles. `style` sets sizes for a paper, and `save` writes a file:

    with plotting.style("column"):
        axes = result.plot()
    plotting.save(axes, "accuracy.pdf")
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dcliques_jax import _checks, cliques
from dcliques_jax._plotting import graphs
from dcliques_jax._plotting import style as style_lib
from dcliques_jax._plotting.style import CLASS_COLOURS, COLOURS, LINE_STYLES, place_legend, save, style
from dcliques_jax.clocks import Clock
from dcliques_jax.partitions import PartitionedDataset
from dcliques_jax.results import Result
from dcliques_jax.topologies import Topology

__all__ = [
    "CLASS_COLOURS",
    "COLOURS",
    "LINE_STYLES",
    "place_legend",
    "plot_accuracy",
    "plot_accuracy_per_message",
    "plot_consensus",
    "plot_loss",
    "plot_partition",
    "plot_per_class",
    "plot_skew",
    "plot_topology",
    "save",
    "style",
]

_MOST_ROUNDS = 8  # of a sequence that are drawn
_PER_LINE = 4
_TIMES = {
    "epoch": "epochs",
    "round": "rounds",
    "messages": "messages per node",
    "bytes": "bytes per node",
    "seconds": "seconds",
}


def plot_topology(topology: Topology, label_distribution: npt.ArrayLike | None = None, *, ax: Any = None) -> Any:
    """Draws who talks to whom, and who has which labels.

    Cliques are small circles of nodes on a large circle. Many cliques zigzag around it, and the cliques of a fractal
    are circles of circles. Nodes face the cliques they are linked to. Edges inside cliques are fainter.

    Without cliques, rings and complete graphs are circles, and rectangular grids are upright with the longer side
    across. In other graphs of up to 1,500 nodes, distances follow those in the graph. Of more than 20,000 edges, a
    random 20,000 are drawn, and the title says so.

    Directed links are arrows to the receiver. A topology with a sequence of graphs has one panel per round, at most 8,
    with nodes in the same places; the array of axes is returned. In given axes, and in axes of graphs that are drawn at
    random, there is one panel: the links of all rounds, or of one.

    Args:
      topology: any topology.
      label_distribution: p_i(y) of every node, `[nodes, classes]`. Up to 200 nodes become pies of their labels. More
        nodes become dots in the colour of their most frequent label.
      ax: matplotlib axes.
    """
    nodes = graphs.place(topology, label_distribution)
    rounds = 1 if topology.matrices is None or topology.drawn else len(topology.matrices)
    if ax is None and rounds > 1:
        axes = _panels(topology.name, min(rounds, _MOST_ROUNDS))
        for turn, panel in enumerate(axes):
            graphs.draw(panel, nodes, graphs.links_of_round(topology, turn), f"round {turn + 1} of {rounds}")
            panel.title.set_size("medium")
    else:
        axes = _axes(ax, 5 / 6)
        title = f"{topology.name}, one round" if topology.drawn else topology.name
        graphs.draw(axes, nodes, graphs.all_links(topology), title)
    if label_distribution is not None:
        graphs.label_bar(axes, nodes.colours)
    return axes


def plot_partition(data: PartitionedDataset, *, ax: Any = None) -> Any:
    """Draws how many examples of each label every node holds.

    Args:
      data: the partition.
      ax: matplotlib axes.
    """
    from matplotlib.ticker import MaxNLocator

    ax = _axes(ax, 3 / 7)
    image = ax.imshow(data.label_counts.T, aspect="auto", origin="lower", vmin=0, cmap="viridis")
    ax.set(xlabel="node", ylabel="label")
    ax.locator_params(integer=True)
    ax.figure.colorbar(image, ax=ax, label="examples", ticks=MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    return ax


def plot_accuracy(
    results: Mapping[str, Result], *, ax: Any = None, x: str = "epoch", clock: Clock | None = None
) -> Any:
    """Draws accuracy over time: the mean over nodes bold, min and max thin.

    Each result has its colour and line style. Thin lines show how nodes differ, bands show how seeds differ: with
    several seeds every line is the mean over seeds, and a band spans the lowest to the highest mean over nodes.

    Args:
      results: results by their label in the legend.
      ax: matplotlib axes.
      x: what to draw over: `"epoch"`, `"round"`, `"messages"` or `"bytes"` that a node has sent, or `"seconds"`.
      clock: one of `dcliques_jax.clocks`, for `x="seconds"`.
    """
    _check_results(results)
    for label, result in results.items():
        if np.isnan(result.history.accuracy).all():
            raise ValueError(f"{label!r} has no accuracy, since real numbers are predicted: use plot_loss")
    return _plot_nodes(results, "accuracy", 100, f"{_evaluated_on(results)} accuracy (%)", ax, x, clock)


def plot_loss(results: Mapping[str, Result], *, ax: Any = None, x: str = "epoch", clock: Clock | None = None) -> Any:
    """Draws loss over time, with the lines, bands and arguments of `plot_accuracy`."""
    _check_results(results)
    return _plot_nodes(results, "loss", 1, f"{_evaluated_on(results)} loss", ax, x, clock)


def plot_consensus(results: Mapping[str, Result], *, ax: Any = None) -> Any:
    """Draws the distance of models from their mean over epochs, on a logarithmic axis.

    A distance of exactly zero, such as that of equal models before training, is a triangle at the bottom of the axes.
    With several seeds the line is the mean, and a band spans the lowest to the highest.

    Args:
      results: results by their label in the legend.
      ax: matplotlib axes.
    """
    _check_results(results)
    new, ax = ax is None, _axes(ax, 2 / 3)
    for label, result, look in _looks(results, ax):
        history = result.history
        distance = history.consensus_distance.reshape(-1, len(history.epoch))
        apart = (distance > 0).any(axis=0)
        _curve(ax, history.epoch, np.where(apart, distance, np.nan), look, label)
        if not apart.all():
            below = {"transform": ax.get_xaxis_transform(), "clip_on": False, "label": f"_{style_lib.ZERO}"}
            ax.plot(history.epoch[~apart], np.zeros((~apart).sum()), "v", color=look.colour, **below)
    ax.set_yscale("log")
    return _finish(ax, "epochs", "consensus distance", new)


def plot_accuracy_per_message(
    results: Mapping[str, Result], *, messages: Mapping[str, float] | None = None, ax: Any = None
) -> Any:
    """Draws mean accuracy against the messages sent per node, on a logarithmic axis.

    In every round `dsgd` sends one message per edge and direction and, if it averages gradients, one more per gradient
    edge and direction, as `topology.report()` counts. Bands are over seeds.

    Args:
      results: results by their label in the legend.
      messages: messages per node and round by label. Required for algorithms whose `Traits` do not declare what they
        send.
      ax: matplotlib axes.
    """
    _check_results(results)
    given = messages or {}
    if unknown := set(given) - set(results):
        raise ValueError(f"messages are given for {sorted(unknown)}, but the results are {list(results)}")
    counts = {
        label: result.history.round * given[label] if label in given else _time(label, result, "messages", None)
        for label, result in results.items()
    }
    new, ax = ax is None, _axes(ax, 2 / 3)
    for label, result, look in _looks(results, ax):
        sent = counts[label]
        percent = 100 * _by_seed(result.history.accuracy)
        _curve(ax, sent[sent > 0], percent.mean(axis=2)[:, sent > 0], look, label)
    ax.set_xscale("log")
    return _finish(ax, "messages sent per node", f"{_evaluated_on(results)} accuracy (%)", new)


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
        ax.hlines(gaps, -0.5, values.shape[1] - 0.5, colors=[ax.get_facecolor()], linewidths=style_lib.line_width())
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
    """Draws histograms of the skew of cliques, for example to compare random cliques with those of Greedy Swap.

    Args:
      label_distribution: p_i(y) of every node, `[nodes, classes]`.
      clique_ids_by_name: clique ids `[nodes]`, or of several experiments `[experiments, nodes]`, by their label in the
        legend.
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
        edge = {"edgecolor": look.colour, "linestyle": look.style, "linewidth": style_lib.line_width()}
        ax.hist(values, bins, weights=percent, label=label, histtype="stepfilled", facecolor=(look.colour, 0.4), **edge)
    return _finish(ax, "skew of a clique", "cliques (%)", new)


class _Look(NamedTuple):
    colour: str
    style: Any  # a line style of matplotlib


def _axes(ax: Any, aspect: float) -> Any:
    """Returns the given axes, or those of a new figure whose height is `aspect` times its width."""
    import matplotlib.pyplot as plt

    width = plt.rcParams["figure.figsize"][0]
    return plt.subplots(figsize=(width, aspect * width), layout="constrained")[1] if ax is None else ax


def _panels(title: str, count: int) -> Any:
    """Returns the axes of small square panels in a new figure, `[count]`."""
    import matplotlib.pyplot as plt

    columns = min(count, _PER_LINE)
    lines = -(-count // columns)
    width = plt.rcParams["figure.figsize"][0]
    size = (width, width * lines / columns * 1.12)
    figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(title)
    for unused in axes.ravel()[count:]:
        unused.remove()
    return axes.ravel()[:count]


def _finish(ax: Any, xlabel: str, ylabel: str, new: bool) -> Any:
    ax.set(xlabel=xlabel, ylabel=ylabel)
    ax.grid(alpha=0.25)
    place_legend(ax, grow=new)
    return ax


def _check_mapping(by_label: Any, what: str) -> None:
    if not isinstance(by_label, Mapping) or not by_label:
        raise ValueError(f"there is no {what} to draw in {by_label!r}: pass a mapping such as {{'label': {what}}}")


def _check_results(results: Mapping[str, Result]) -> None:
    _check_mapping(results, "result")
    for label, result in results.items():
        if result.combinations():
            raise ValueError(f"result {label!r} is a sweep: pass result.best(), or result.at(...) of combinations")


def _evaluated_on(results: Mapping[str, Result]) -> str:
    """Returns the examples that results were evaluated on, for a label of an axis."""
    return " or ".join(dict.fromkeys(result.provenance["evaluate_on"] for result in results.values()))


def _looks(by_label: Mapping[str, Any], ax: Any) -> Iterator[tuple[str, Any, _Look]]:
    """Yields labels and values with a look each. Looks continue after those in use."""
    drawn = len(ax.get_legend_handles_labels()[1])
    for number, (label, value) in enumerate(by_label.items(), start=drawn):
        yield label, value, _Look(COLOURS[number % len(COLOURS)], LINE_STYLES[number % len(LINE_STYLES)])


def _by_seed(values: np.ndarray) -> np.ndarray:
    """Reshapes values [t, nodes] of one seed to [1, t, nodes]; several seeds stay [seeds, t, nodes]."""
    return values.reshape(-1, *values.shape[-2:])


def _plot_nodes(
    results: Mapping[str, Result], field: str, scale: float, ylabel: str, ax: Any, x: str, clock: Clock | None
) -> Any:
    """Draws a field [t, nodes] of histories over time: its mean over nodes bold, its extremes thin."""
    _checks.choice("x", x, tuple(_TIMES))
    if (x == "seconds") != (clock is not None):
        raise ValueError(f"x={x!r} and clock={clock!r}: pass a clock, such as clocks.WAN, with x='seconds' only")
    new, ax = ax is None, _axes(ax, 2 / 3)
    for label, result, look in _looks(results, ax):
        time, values = _time(label, result, x, clock), scale * _by_seed(getattr(result.history, field))
        _curve(ax, time, values.mean(axis=2), look, label)
        for extreme in (values.min(axis=2), values.max(axis=2)):
            thin = {"linewidth": style_lib.THIN * style_lib.line_width(), "label": f"_{style_lib.EXTREMES}"}
            ax.plot(time, extreme.mean(axis=0), color=look.colour, linestyle=look.style, **thin)
    return _finish(ax, _TIMES[x], ylabel, new)


def _curve(ax: Any, x: np.ndarray, values: np.ndarray, look: _Look, label: str) -> None:
    """Draws the mean of values [seeds, t] over seeds, and a band from the lowest to the highest."""
    ax.plot(x, values.mean(axis=0), color=look.colour, linestyle=look.style, label=label)
    if len(values) > 1:
        band = {"alpha": 0.3, "linewidth": 0, "label": f"_{style_lib.SEEDS}"}
        ax.fill_between(x, values.min(axis=0), values.max(axis=0), color=look.colour, **band)


def _time(label: str, result: Result, x: str, clock: Clock | None) -> np.ndarray:
    """Returns the position of each evaluation on the axis x, `[t]`, the mean over seeds if there are several."""
    time = getattr(result.history, x) if clock is None else result.seconds(clock)
    if not np.isnan(time).any():
        return np.asarray(time if time.ndim == 1 else time.mean(axis=0))
    raise ValueError(
        f"the algorithm of result {label!r} does not tell what it sends: pass the messages per node and round, "
        f"messages={{{label!r}: ...}}, or give the algorithm Traits(sends=...)"
    )


def _per_class(result: Result, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The evaluated nodes, and their accuracy on every class at the last evaluation `[nodes, classes]`."""
    if not isinstance(result, Result):
        raise ValueError(f"there is no result to draw in {result!r}: pass what simulate returned")
    _check_results({name: result})
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
