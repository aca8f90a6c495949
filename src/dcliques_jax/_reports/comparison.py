"""Reports side by side."""

import dataclasses
from collections.abc import Callable
from typing import Any

from dcliques_jax import _html
from dcliques_jax._reports.measures import MATRICES
from dcliques_jax._reports.report import Report, in_bytes, messages

_WIDTH = 120  # characters of a line, so that the table fits a terminal
_SHORTER = {"neighbourhood skew": "neighb. skew"}
_SHORT = dict(zip(MATRICES.values(), ("symmetric", "directed", "rows only"), strict=True))


@dataclasses.dataclass(frozen=True, repr=False)
class Comparison:
    """Reports of several topologies. It prints as a table of at most 120 columns, in notebooks as HTML.

    Messages are means over nodes and rounds, in brackets the most that a node sends in a round if it is more.

    Under faults, W, `|lambda2|` and the contraction are those to expect. `-` stands for what a topology does not have.
    """

    reports: list[Report]

    def to_pandas(self) -> Any:
        """Returns a pandas DataFrame with one row per topology and a column for each field of its `Report`.

        Columns without any value are left out. Under faults there are columns `expected_...`.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("Comparison.to_pandas needs the package pandas: pip install pandas") from error
        rows = []
        for report in self.reports:
            row = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
            expected = row.pop("expected")
            if expected is not None:
                row |= {f"expected_{name}": value for name, value in expected._asdict().items() if name != "faults"}
            rows.append(row)
        return pd.DataFrame(rows).set_index("name").dropna(axis=1, how="all")

    def _caption(self) -> str:
        nodes = sorted({report.num_nodes for report in self.reports})
        told = f"{len(self.reports)} topologies of {' and '.join(f'{count:,}' for count in nodes)} nodes"
        expected = self.reports[0].expected
        return told if expected is None else f"{told}, expected under {', '.join(expected.faults)}"

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Returns the header and the rows, without columns that are empty everywhere."""
        cells = [[_or_dash(value(report)) for _, value in _COLUMNS] for report in self.reports]
        used = [column for column in range(len(_COLUMNS)) if any(row[column] != "-" for row in cells)]
        return [_COLUMNS[column][0] for column in used], [[row[column] for column in used] for row in cells]

    def __str__(self) -> str:
        header, rows = self._table()
        high = [_SHORTER.get(label, label).rpartition(" ")[::2] for label in header]  # the header has two lines
        lines = [[upper for upper, _ in high], [lower for _, lower in high], *rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        widths[0] = min(widths[0], _WIDTH - sum(2 + width for width in widths[1:]))
        return "\n".join([self._caption(), *(_line(cells, widths) for cells in lines)])

    def __repr__(self) -> str:
        return f"Comparison({[report.name for report in self.reports]})"

    def _repr_html_(self) -> str:
        return _html.grid(self._caption(), *self._table())


def _matrix(report: Report) -> str:
    if report.expected is not None and not report.expected.doubly_stochastic:
        return "rows only"
    return _SHORT[report.matrix]


def _second_eigenvalue(report: Report) -> str | None:
    found = report.second_eigenvalue if report.expected is None else report.expected.second_eigenvalue
    return None if found is None else f"{found:.4f}"


def _contraction(report: Report) -> str | None:
    found = report.contraction if report.expected is None else report.expected.contraction
    return None if found is None else f"{found:.4f}"


def _formatted(field: str, form: str) -> Callable[[Report], str | None]:
    def value(report: Report) -> str | None:
        found = getattr(report, field)
        return None if found is None else format(found, form)

    return value


_COLUMNS: list[tuple[str, Callable[[Report], str | None]]] = [
    ("", lambda report: report.name),
    ("messages", lambda report: messages(report).replace("at most ", "")),
    ("bytes", lambda report: None if report.bytes is None else in_bytes(report.bytes)),
    ("W", _matrix),
    ("|lambda2|", _second_eigenvalue),
    ("contraction", _contraction),
    ("clique skew", _formatted("clique_skew", ".3f")),
    ("neighbourhood skew", _formatted("neighbourhood_skew", ".3f")),
    ("label bias", _formatted("label_bias", ".4f")),
    ("weight variance", _formatted("weight_variance", ".4f")),
]


def _or_dash(text: str | None) -> str:
    return "-" if text is None else text


def _line(cells: list[str], widths: list[int]) -> str:
    name, *others = cells
    if len(name) > widths[0]:
        name = f"{name[: widths[0] - 3]}..."
    aligned = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
    return "  ".join([name.ljust(widths[0]), *aligned]).rstrip()
