"""Tables for notebooks."""

import html
from collections.abc import Iterable


def table(caption: str, rows: Iterable[tuple[str, str]]) -> str:
    """A table of labels and values; sets no colours, so it is readable on light and on dark pages."""
    cells = "".join(
        f"<tr><td style='text-align:left'>{html.escape(label).replace('  ', '&emsp;')}</td>"
        f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
        for label, value in rows
    )
    return f"<table><caption>{html.escape(caption)}</caption>{cells}</table>"


def span(least: float, most: float, form: str = ",") -> str:
    """Two numbers as a range, or one if they are written alike."""
    first, last = format(least, form), format(most, form)
    return first if first == last else f"{first} to {last}"
