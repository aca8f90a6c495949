"""Pictures of results."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcliques_jax.results import Result

# Okabe and Ito's palette, without its yellow: told apart by colour-blind readers, on white and on dark grounds.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")


def plot_accuracy(results: Mapping[str, "Result"], *, ax: Any = None) -> Any:
    """Draws test accuracy over epochs, one colour a result: mean over nodes bold, minimum and maximum thin.

    Args:
      results: results by the label they get in the legend.
      ax: matplotlib axes to draw into; a new figure by default.

    Returns:
      The matplotlib axes.
    """
    import matplotlib.pyplot as plt

    if not results:
        raise ValueError("there is no result to draw: pass a mapping such as {'ring': result}")
    if ax is None:
        _, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    drawn = len(ax.lines) // 3  # each result is three lines: go on with the next colour
    for number, (label, result) in enumerate(results.items(), start=drawn):
        history, colour = result.history, COLOURS[number % len(COLOURS)]
        percent = 100 * history.accuracy
        ax.plot(history.epoch, percent.mean(axis=1), color=colour, linewidth=2.5, label=label)
        ax.plot(history.epoch, percent.min(axis=1), color=colour, linewidth=0.7)
        ax.plot(history.epoch, percent.max(axis=1), color=colour, linewidth=0.7)
    ax.set_xlabel("epochs")
    ax.set_ylabel("test accuracy (%)")
    ax.grid(alpha=0.3)
    ax.legend()
    return ax
