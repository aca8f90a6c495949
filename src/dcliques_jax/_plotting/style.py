"""Colours, line styles, sizes and legends of pictures."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from dcliques_jax import _checks

# Okabe and Ito's palette without yellow, which is hard to see on white, and without grey, which colour-blind readers
# confuse with pink and green.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Dashes are in line widths. Curve i has style i % 5 and colour i % 6: neighbours differ in both, and the first 30
# curves all differ.
LINE_STYLES: tuple[Any, ...] = (
    "solid",
    (0, (4, 1.5)),
    (0, (1, 1.2)),
    (0, (6, 1.5, 1, 1.5)),
    (0, (4, 1.2, 1, 1.2, 1, 1.2)),
)
# Petroff's ten colours (arXiv:2107.02270), for classes: easy to tell apart, for colour-blind readers too.
CLASS_COLOURS = (
    *("#3f90da", "#ffa90e", "#bd1f01", "#94a4a2", "#832db6"),
    *("#a96b59", "#e76300", "#b9ac70", "#717581", "#92dadd"),
)
_WIDTHS = {"column": 3.3, "page": 6.9}  # inches, for two-column papers
_TEXT_AS_TEXT: dict[Any, Any] = {"svg.fonttype": "none", "pdf.fonttype": 42, "ps.fonttype": 42}
_LEGEND = {"handlelength": 2.4, "columnspacing": 1.0}  # just long enough to tell dashes apart
THIN = 0.4  # width of the lines of extremes relative to those of means
# The legend explains thin lines, bands and triangles once. Their artists have these labels after an underscore, which
# keeps them out of the legend.
EXTREMES = "min and max over nodes"
SEEDS = "min and max over seeds"
ZERO = "zero"


def style(size: str = "column") -> AbstractContextManager[None]:
    """Sets sizes for a paper: 8 pt text, 1.2 pt lines and figures as wide as a column or a page.

    The sizes apply to everything that is created inside the `with` block, also by matplotlib itself. Other settings
    stay. Combine it with a style of matplotlib to change them: `with plt.style.context("dark_background"),
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
    """Writes a picture to a file in the format of its suffix. PDF, SVG and EPS files store text as text.

    By default matplotlib writes outlines to SVG files, which cannot be searched, and Type 3 fonts to PDF files, which
    some publishers reject.

    Args:
      picture: matplotlib axes, an array of axes of one figure, or a figure.
      path: file to write.
      **options: passed to matplotlib's `Figure.savefig`, such as `dpi=300`.

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
        first = picture.flat[0] if hasattr(picture, "flat") else picture
        first.figure.savefig(path, **options)


def place_legend(ax: Any, *, grow: bool = False) -> None:
    """Draws the legend where it covers no curve: inside the axes if there is room, else below them.

    The functions of this module call it. Call it again after you change the limits or the size of the axes. Drawing
    into other axes of the same figure also changes the size.

    Args:
      ax: matplotlib axes with labelled curves.
      grow: whether a legend below the axes makes the figure taller. Otherwise the axes shrink.
    """
    figure = ax.figure.figure  # the whole figure, also for axes in a subfigure
    handles, labels = ax.get_legend_handles_labels()
    handles = [*handles, *_notes(ax)]
    labels = [*labels, *(note.get_label() for note in handles[len(labels) :])]
    legend = ax.legend(handles, labels, **_LEGEND)
    legend.set_in_layout(False)  # inside the axes it needs no room
    figure.draw_without_rendering()  # overlaps depend on the layout
    if not _covers(legend, ax):
        return
    _legend_below(ax, handles, labels)
    height = ax.get_legend().get_window_extent().height / figure.dpi
    if grow:
        figure.set_figheight(figure.get_figheight() + height)
    elif figure.get_layout_engine() is None:  # an engine makes room itself
        figure.draw_without_rendering()
        missing = 0.01 - ax.get_legend().get_window_extent().y0 / figure.bbox.height
        if missing > 0:
            figure.subplots_adjust(bottom=figure.subplotpars.bottom + missing)


def line_width() -> float:
    import matplotlib as mpl

    return float(mpl.rcParams["lines.linewidth"])


def _notes(ax: Any) -> list[Any]:
    """Makes legend entries for what is drawn besides the labelled curves."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    ink, present = ax.xaxis.label.get_color(), {artist.get_label() for artist in (*ax.lines, *ax.collections)}
    notes = (
        Line2D([], [], color=ink, linewidth=THIN * line_width(), label=EXTREMES),
        Patch(facecolor=ink, alpha=0.3, label=SEEDS),
        Line2D([], [], color=ink, marker="v", linestyle="none", label=ZERO),
    )
    return [note for note in notes if f"_{note.get_label()}" in present]


def _covers(legend: Any, ax: Any) -> bool:
    """Whether a legend hides part of a curve, band or histogram, or does not fit into the axes."""
    box, room = legend.get_window_extent().padded(2), ax.bbox
    if box.width > room.width or box.height > room.height:
        return True
    curves = [line.get_transform().transform_path(line.get_path()) for line in ax.lines]
    shapes = [patch.get_transform().transform_path(patch.get_path()) for patch in ax.patches]
    shapes += [each.get_transform().transform_path(path) for each in ax.collections for path in each.get_paths()]
    hidden = [path.cleaned(remove_nans=True).intersects_bbox(box, filled=False) for path in curves]
    return any(hidden) or any(path.intersects_bbox(box) for path in shapes)


def _legend_below(ax: Any, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Centres the legend under the axes and their labels, in as many columns as fit into their width."""
    from matplotlib.transforms import ScaledTranslation

    # Distances from the axes are in inches, so they stay right when the layout resizes the axes.
    dpi, inner, outer = ax.figure.dpi, ax.bbox, ax.get_tightbbox()
    centre, bottom = (outer.x0 + outer.x1 - inner.x0 - inner.x1) / 2, outer.y0 - inner.y0
    under = ax.transAxes + ScaledTranslation(centre / dpi, bottom / dpi, ax.figure.dpi_scale_trans)
    for columns in range(min(4, len(handles)), 0, -1):
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": under, "borderaxespad": 0.3}
        legend = ax.legend(handles, labels, ncols=columns, **_LEGEND, **place)
        if legend.get_window_extent().width <= outer.width:
            return
