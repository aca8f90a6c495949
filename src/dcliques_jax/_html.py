"""Tables for notebooks."""

import html
from collections.abc import Iterable


def table(caption: str, rows: Iterable[tuple[str, str]]) -> str:
    """Makes a table of labels and values. It sets no colours, so it suits light and dark pages."""
    cells = "".join(
        f"<tr><td style='text-align:left'>{html.escape(label).replace('  ', '&emsp;')}</td>"
        f"<td style='text-align:left'>{html.escape(value)}</td></tr>"
        for label, value in rows
    )
    return f"<table><caption>{html.escape(caption)}</caption>{cells}</table>"


def grid(caption: str, header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Makes a table with a header. The first column is to the left, the others to the right."""

    def line(cells: Iterable[str], tag: str) -> str:
        found = (
            f"<{tag} style='text-align:{'right' if column else 'left'}'>{html.escape(cell)}</{tag}>"
            for column, cell in enumerate(cells)
        )
        return f"<tr>{''.join(found)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<table><caption>{html.escape(caption)}</caption>{line(header, 'th')}{body}</table>"


def span(least: float, most: float, form: str = ",") -> str:
    """Writes two numbers as a range, or as one number if they look the same."""
    first, last = format(least, form), format(most, form)
    return first if first == last else f"{first} to {last}"
