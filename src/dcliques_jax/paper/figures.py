"""The figures, in the paper's style."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dcliques_jax import plotting
from dcliques_jax.paper.experiments import Experiment, SkewExperiment


def draw(experiment: Experiment | SkewExperiment, measured: Mapping[str, Any]) -> Any:
    """Draws results, or skews `[experiments, steps]`, by label. Returns None if there is nothing to draw."""
    if not measured:
        return None
    with plotting.style("page"):
        if isinstance(experiment, SkewExperiment):
            return _draw_skews(experiment, measured)
        return _draw_curves(experiment, measured)


def _draw_curves(experiment: Experiment, results: Mapping[str, Any]) -> Any:
    """Draws panels side by side, with the same limits: mean over nodes bold, minimum and maximum thin."""
    panels = {
        title: {label: results[label] for label in curves if label in results}
        for title, curves in experiment.panels.items()
    }
    shown = [result for curves in panels.values() for result in curves.values()]
    if not shown:
        return None
    figure, axes = _axes(len(panels))
    last = max(result.history.epoch[-1] for result in shown)
    highest = 100 * max(result.history.accuracy.max() for result in shown)
    lowest = experiment.lowest if highest > experiment.lowest else 0  # runs that stop early are below it
    for ax, (title, curves) in zip(axes, panels.items(), strict=True):
        if curves:
            plotting.plot_accuracy(curves, ax=ax)
            ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set(title=title, xlim=(0, last), ylim=(lowest, highest + 0.05 * (highest - lowest)))
    for ax in axes[: len(panels)]:
        if ax.lines:
            plotting.place_legend(ax)  # again, now that all limits are set
    return figure


def _draw_skews(experiment: SkewExperiment, skews: Mapping[str, np.ndarray]) -> Any:
    """Draws skew over steps, or its distribution before and after."""
    figure, axes = _axes(1 if experiment.over_steps else len(skews))
    if experiment.over_steps:
        for colour, (label, trajectories) in zip(plotting.COLOURS, skews.items(), strict=False):
            steps = np.arange(trajectories.shape[1])
            axes[0].plot(steps, trajectories.mean(axis=0), color=colour, label=label)
            for extreme in (trajectories.min(axis=0), trajectories.max(axis=0)):
                axes[0].plot(steps, extreme, color=colour, linewidth=0.6)
        axes[0].set(xlabel="steps of Greedy Swap", ylabel="mean skew of cliques", ylim=(0, None))
        plotting.place_legend(axes[0])
    else:
        for ax, (label, trajectories) in zip(axes, skews.items(), strict=True):
            bins = np.linspace(0, trajectories[:, 0].max(), 41)
            for colour, name, step in zip(plotting.COLOURS, ("Greedy Swap", "random cliques"), (-1, 0), strict=False):
                ax.hist(trajectories[:, step], bins, color=colour, alpha=0.7, label=name)
            ax.set(title=label, xlabel="mean skew of cliques", ylabel="experiments")
            plotting.place_legend(ax)
    return figure


def _axes(count: int) -> tuple[Any, list[Any]]:
    import matplotlib.pyplot as plt

    columns = 2 if count == 4 else count
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(max(4.8, 3.6 * columns), 3.2 * rows), layout="constrained", sharey=True, squeeze=False
    )
    return figure, list(axes.flat)
