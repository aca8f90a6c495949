"""The report of one topology, and how it prints."""

import dataclasses

from dcliques_jax import _html
from dcliques_jax._reports.expected import Expected


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The properties of a topology and its gossip matrix W. It prints as a table, in notebooks as HTML.

    W is that of `topology.weights()`: the topology's own, or Metropolis-Hastings weights. If matrices change from round
    to round, edges are those of all rounds together.

    Messages are counted per node and round. Averaging gradients takes further messages. The paper counts two messages
    per edge and direction, `messages_averaging_paper`. Gradients only travel over the edges inside cliques, which gives
    the tight count `messages_averaging`. Skews and bias are None without a label distribution, bytes without a number
    of parameters.

    The two terms that STL-FW (Le Bars et al. 2023) minimises, for label distributions p with mean pbar:

        label_bias = (1 / n) |W p - 1 pbar^T|_F^2      weight_variance = (1 / n) |W - 1 1^T / n|_F^2
    """

    name: str
    num_nodes: int
    num_edges: int
    num_arcs: int | None  # of directed graphs
    num_cliques: int | None
    num_rounds: int  # after which matrices repeat; 1: always the same
    drawn: bool  # whether nodes swap their places in the graphs at random in every round
    matrix: str  # what holds for W besides rows that sum to 1
    edges_per_node: float
    min_edges: int
    max_edges: int
    second_eigenvalue: float | None  # |lambda2| of W; None unless W is one symmetric matrix
    smallest_eigenvalue: float | None
    contraction: float  # share of squared differences between models that a round leaves; see `mixing.contraction`
    mean_distance: float | None  # None if not every node reaches every other, or if links are drawn
    diameter: int | None
    distance_sources: int  # nodes from which distances were measured; unless all, the diameter may be larger
    clique_skew: float | None  # mean over cliques
    max_clique_skew: float | None
    neighbourhood_skew: float | None  # mean over nodes of the skew of a node and those it hears from
    max_neighbourhood_skew: float | None
    label_bias: float | None
    weight_variance: float
    messages: float
    max_messages: int  # most that a node sends in a round
    messages_averaging: float | None
    messages_averaging_paper: float | None
    bytes: float | None
    bytes_averaging: float | None
    num_devices: int | None = None  # of the mesh; whole cliques share a device
    cut_edges: int | None = None  # edges between nodes on different devices
    rows_between_devices: int | None = None  # models that leave a device per round, sum over devices
    rows_between_devices_averaging: int | None = None  # models and gradients
    bytes_between_devices: int | None = None
    bytes_between_devices_averaging: int | None = None
    seconds: float | None = None  # length of a round by a clock, the mean over rounds, without averaging gradients
    seconds_averaging: float | None = None
    expected: Expected | None = None  # under faults

    @property
    def spectral_gap(self) -> float | None:
        """One minus `|lambda2|`."""
        return None if self.second_eigenvalue is None else 1.0 - self.second_eigenvalue

    def _title(self) -> str:
        cliques_part = "" if self.num_cliques is None else f", {self.num_cliques} cliques"
        links = f"{self.num_edges:,} edges" if self.num_arcs is None else f"{self.num_arcs:,} arcs"
        if self.drawn:
            links = "drawn in every round"
        elif self.num_rounds > 1:
            links += f" in {self.num_rounds} rounds"
        return f"{self.name}: {self.num_nodes:,} nodes{cliques_part}, {links}"

    def _rows(self) -> list[tuple[str, str]]:
        return [
            *self._graph_rows(),
            *self._label_rows(),
            *self._message_rows(),
            *self._device_rows(),
            *self._fault_rows(),
        ]

    def _graph_rows(self) -> list[tuple[str, str]]:
        rows = []
        every = ", all rounds" if self.num_rounds > 1 else ""
        if self.num_arcs is None and not self.drawn:
            each = f"{self.edges_per_node:.2f} ({self.min_edges} to {self.max_edges})"
            rows.append((f"edges per node{every}", each))
        elif self.num_arcs is not None and not self.drawn:
            rows.append((f"arcs per node{every}", f"{self.num_arcs / self.num_nodes:.2f}"))
        rows.append(("gossip matrix", self.matrix))
        if self.second_eigenvalue is not None:
            rows.append(("|lambda2|", f"{self.second_eigenvalue:.5f} (spectral gap {self.spectral_gap:.3g})"))
            rows.append(("smallest eigenvalue", f"{self.smallest_eigenvalue:.5f}"))
        rows.append(("contraction per round", self._contraction()))
        if self.diameter is not None:
            sampled = self.distance_sources < self.num_nodes
            least = "at least " if sampled else ""
            said = f", measured from {self.distance_sources:,} random nodes" if sampled else ""
            rows.append(("distance between nodes", f"{self.mean_distance:.2f} (diameter {least}{self.diameter}{said})"))
        elif not self.drawn:
            rows.append(("distance between nodes", "not every node reaches every other"))
        return rows

    def _contraction(self) -> str:
        if self.contraction == 0:
            return f"0 (models agree after {self.num_rounds} round{'s' * (self.num_rounds > 1)})"
        said = ", the mean factor" if self.num_rounds > 1 and not self.drawn else ", expected" if self.drawn else ""
        return f"{self.contraction:.5f} of squared differences{said}"

    def _label_rows(self) -> list[tuple[str, str]]:
        rows = []
        if self.clique_skew is not None:
            rows.append(("clique skew", f"{self.clique_skew:.3f} (at most {self.max_clique_skew:.3f})"))
        if self.neighbourhood_skew is not None:
            text = f"{self.neighbourhood_skew:.3f} (at most {self.max_neighbourhood_skew:.3f})"
            rows.append(("neighbourhood skew", text))
        if self.label_bias is not None:
            rows.append(("label bias", f"{self.label_bias:.4f}"))
        rows.append(("weight variance", f"{self.weight_variance:.4f}"))
        return rows

    def _message_rows(self) -> list[tuple[str, str]]:
        rows = [("messages per node and round", messages(self))]
        if self.messages_averaging is not None:
            text = f"{self.messages_averaging:.1f} ({self.messages_averaging_paper:.1f} as the paper counts)"
            rows.append(("  with gradient averaging", text))
        if self.bytes is not None:
            rows.append(("bytes per node and round", in_bytes(self.bytes)))
        if self.bytes_averaging is not None:
            rows.append(("  with gradient averaging", in_bytes(self.bytes_averaging)))
        if self.seconds is not None:
            rows.append(("seconds per round", f"{self.seconds:.3g}"))
        if self.seconds_averaging is not None:
            rows.append(("  with gradient averaging", f"{self.seconds_averaging:.3g}"))
        return rows

    def _device_rows(self) -> list[tuple[str, str]]:
        rows = []
        if self.cut_edges is not None:
            cut = f"{self.cut_edges:,} of {self.num_edges:,} ({self.cut_edges / max(1, self.num_edges):.1%})"
            rows.append((f"edges between {self.num_devices} devices", cut))
            every = ", those of all rounds" if self.num_rounds > 1 else ""
            rows.append(("models moved between devices", f"{self.rows_between_devices:,} per round{every}"))
        if self.bytes_between_devices is not None:
            rows.append(("bytes moved between devices", f"{in_bytes(self.bytes_between_devices)} per round"))
        if self.bytes_between_devices_averaging is not None:
            rows.append(("  with gradient averaging", f"{in_bytes(self.bytes_between_devices_averaging)} per round"))
        return rows

    def _fault_rows(self) -> list[tuple[str, str]]:
        if (expected := self.expected) is None:
            return []
        rows = [("faults", ", ".join(expected.faults)), ("  messages that arrive", f"{100 * expected.arrival:.1f} %")]
        if expected.online < self.num_nodes:
            rows.append(("  nodes online", f"{expected.online:.1f} on average"))
        if expected.second_eigenvalue is not None:
            rows.append(("  |lambda2| of the mean W", f"{expected.second_eigenvalue:.5f}"))
        if expected.contraction is not None:
            rows.append(("  contraction per round", f"{expected.contraction:.5f} of squared differences, expected"))
        kept = "doubly stochastic" if expected.doubly_stochastic else "rows sum to 1, columns do not: the mean drifts"
        rows.append(("  gossip matrix", kept))
        return rows

    def __str__(self) -> str:
        return "\n".join([self._title(), *(f"  {label:<28} {value}" for label, value in self._rows())])

    def __repr__(self) -> str:
        grouped = "" if self.num_cliques is None else f", cliques={self.num_cliques}"
        links = f"edges={self.num_edges}" if self.num_arcs is None else f"arcs={self.num_arcs}"
        speed = f"contraction={self.contraction:.3g}"
        if self.spectral_gap is not None:
            speed = f"spectral_gap={self.spectral_gap:.3g}"
        each = f"edges_per_node={self.edges_per_node:.2f}"
        return f"Report({self.name!r}, num_nodes={self.num_nodes}, {links}{grouped}, {each}, {speed})"

    def _repr_html_(self) -> str:
        return _html.table(self._title(), self._rows())


def messages(report: Report) -> str:
    """Writes the mean number of messages, and the most if it is more."""
    mean, most = report.messages, report.max_messages
    if mean == most:
        return f"{mean:.1f}"
    return f"{mean:.1f} (at most {most:,})" if round(mean, 1) < most else f"{mean:.2f} (at most {most:,})"


def in_bytes(count: float) -> str:
    """Writes a number of bytes with three digits and a unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
