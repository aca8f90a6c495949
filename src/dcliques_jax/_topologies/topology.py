"""The class of all topologies."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import scipy.sparse

from dcliques_jax import _arrays, _checks, _edges, _html
from dcliques_jax import cliques as cliques_lib
from dcliques_jax._mixing.entries import check_rows, check_square

if TYPE_CHECKING:
    from dcliques_jax.clocks import Clock
    from dcliques_jax.faults import Fault
    from dcliques_jax.mixing import Weights
    from dcliques_jax.reports import Report


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Topology:
    """Who may ever talk to whom, and the edges over which gradients may be averaged. Its arrays are read-only.

    Most topologies are connected, undirected graphs, which `from_edges` makes. A directed graph lists its `arcs`, too.
    A topology may carry gossip matrices of its own, one or a sequence that repeats; `edges` are then those of all
    matrices together, and only they must be connected. `from_matrices` makes such topologies.
    """

    num_nodes: int
    edges: np.ndarray  # [edges, 2] each edge once, the smaller node first, in order
    clique_ids: np.ndarray | None  # [nodes] the clique of each node, None without cliques
    gradient_edges: np.ndarray | None  # [.., 2] those of `edges` that also carry gradients, if any
    name: str
    arcs: np.ndarray | None = None  # [arcs, 2] (sender, receiver) in order, None if every edge carries both ways
    matrices: tuple[scipy.sparse.csr_array, ...] | None = None  # own gossip matrices, one per round in turn
    drawn: bool = False  # whether nodes swap their places in the matrices at random in every round

    def __post_init__(self) -> None:
        _checks.text("name", self.name)
        num_nodes = _checks.integer("num_nodes", self.num_nodes, 1)
        edges = _edges.ordered(num_nodes, "edges", self.edges)
        object.__setattr__(self, "num_nodes", num_nodes)
        object.__setattr__(self, "edges", edges)
        if not self.drawn:
            _edges.check_connected(num_nodes, edges, self.name)
        if self.clique_ids is not None:
            ids = cliques_lib.check_clique_ids(self.clique_ids, num_nodes)
            object.__setattr__(self, "clique_ids", _arrays.frozen(ids))
        if self.gradient_edges is not None:
            gradient_edges = _edges.ordered(num_nodes, "gradient_edges", self.gradient_edges)
            _edges.check_gradient_edges(num_nodes, edges, gradient_edges, self.clique_ids)
            object.__setattr__(self, "gradient_edges", gradient_edges)
        elif self.clique_ids is not None:
            raise ValueError("gradient_edges=None with clique_ids: pass the edges inside cliques, as from_edges does")
        self._check_communication()

    def _check_communication(self) -> None:
        """Checks arcs and matrices against the edges, and makes them read-only."""
        if self.drawn and self.clique_ids is not None:
            raise ValueError("drawn=True with clique_ids: nodes that swap their places have no fixed cliques")
        if self.drawn and self.matrices is None:
            raise ValueError("drawn=True without matrices: pass the matrices in which nodes swap their places")
        if self.arcs is not None:
            arcs = _edges.arcs_in_order(self.num_nodes, _edges.as_pairs(self.num_nodes, "arcs", self.arcs))
            _edges.check_same(self.num_nodes, "arcs", arcs, self.edges)
            object.__setattr__(self, "arcs", _arrays.frozen(arcs))
        if self.matrices is not None:
            matrices = tuple(_checked_matrix(matrix, self.num_nodes) for matrix in self.matrices)
            if not matrices:
                raise ValueError("matrices=() holds no matrix: pass at least one, or None")
            _edges.check_same(self.num_nodes, "matrices", arcs_of(matrices), self.edges)
            object.__setattr__(self, "matrices", matrices)

    __reduce__ = _arrays.rebuilt

    @property
    def degrees(self) -> np.ndarray:
        """Number of neighbours of each node, `[nodes]`."""
        return np.bincount(self.edges.ravel(), minlength=self.num_nodes)

    def adjacency(self) -> scipy.sparse.csr_array:
        """The symmetric adjacency matrix with entries 1.0, as a SciPy sparse array."""
        i, j = self.edges.T
        rows, columns = np.concatenate([i, j]), np.concatenate([j, i])
        return scipy.sparse.csr_array((np.ones(len(rows)), (rows, columns)), shape=(self.num_nodes, self.num_nodes))

    def heard(self) -> scipy.sparse.csr_array:
        """Who may hear from whom, with entries 1.0, as a SciPy sparse array: rows are receivers, columns senders."""
        if self.arcs is None:
            return self.adjacency()
        senders, receivers = self.arcs.T
        shape = (self.num_nodes, self.num_nodes)
        return scipy.sparse.csr_array((np.ones(len(self.arcs)), (receivers, senders)), shape=shape)

    def weights(self) -> "Weights":
        """Returns the gossip matrix W that algorithms use; see `dcliques_jax.mixing.of_topology`."""
        from dcliques_jax import mixing

        return mixing.of_topology(self)

    def report(
        self,
        label_distribution: npt.ArrayLike | None = None,
        *,
        num_parameters: int | None = None,
        num_devices: int | None = None,
        faults: "Fault | Sequence[Fault] | None" = None,
        clock: "Clock | None" = None,
    ) -> "Report":
        """Measures what this topology costs and promises, before any training.

        The arguments are those of `dcliques_jax.reports.make_report`.
        """
        from dcliques_jax.reports import make_report

        sizes: dict[str, Any] = {"num_parameters": num_parameters, "num_devices": num_devices}
        return make_report(self, label_distribution, **sizes, faults=faults, clock=clock)

    def plot(self, label_distribution: npt.ArrayLike | None = None, *, ax: Any = None) -> Any:
        """Draws the graph and the labels of nodes; see `dcliques_jax.plotting.plot_topology`."""
        from dcliques_jax import plotting

        return plotting.plot_topology(self, label_distribution, ax=ax)

    def __repr__(self) -> str:
        grouped = "" if self.clique_ids is None else f", cliques={self.clique_ids.max() + 1}"
        turns = "" if self.matrices is None or len(self.matrices) == 1 else f", matrices={len(self.matrices)}"
        links = f"edges={len(self.edges)}" if self.arcs is None else f"arcs={len(self.arcs)}"
        return f"Topology({self.name!r}, num_nodes={self.num_nodes}, {links}{grouped}{turns})"

    def _repr_html_(self) -> str:
        degrees = self.degrees
        each = f"{degrees.mean():.2f} ({_html.span(degrees.min(), degrees.max())})"
        rows = [("nodes", f"{self.num_nodes:,}"), ("edges", f"{len(self.edges):,}"), ("edges per node", each)]
        if self.clique_ids is not None:
            sizes = np.bincount(self.clique_ids)
            rows.append(("cliques", f"{len(sizes):,} of {_html.span(sizes.min(), sizes.max())} nodes"))
        return _html.table(self.name, rows)


def make_topology(
    num_nodes: int,
    edges: np.ndarray,
    name: str,
    clique_ids: np.ndarray | None = None,
    gradient_edges: np.ndarray | None = None,
) -> Topology:
    """Makes a `Topology` from edges in any order. Self-loops are left out."""
    if gradient_edges is not None:
        gradient_edges = _arrays.frozen(_edges.in_order(num_nodes, gradient_edges))
    return Topology(num_nodes, _arrays.frozen(_edges.in_order(num_nodes, edges)), clique_ids, gradient_edges, name)


def arcs_of(matrices: Sequence[scipy.sparse.csr_array]) -> np.ndarray:
    """Returns the messages of all matrices together as arcs (sender, receiver), each once and in order."""
    entries = [scipy.sparse.coo_array(matrix) for matrix in matrices]
    arcs = [np.stack([e.coords[1], e.coords[0]], axis=1)[e.data != 0] for e in entries]
    return _edges.arcs_in_order(matrices[0].shape[0], np.concatenate(arcs))


def _checked_matrix(matrix: Any, num_nodes: int) -> scipy.sparse.csr_array:
    """Returns a gossip matrix with read-only arrays; raises a `ValueError` unless rows are weights that sum to 1."""
    check_square(matrix)
    if matrix.shape[0] != num_nodes:
        raise ValueError(f"a matrix is for {matrix.shape[0]} nodes, the topology has {num_nodes}")
    checked = scipy.sparse.csr_array(matrix, dtype=np.float64)
    check_rows(checked)
    if checked.data.min(initial=0) < 0:
        raise ValueError(f"weights must not be negative, but the smallest is {checked.data.min():.6g}")
    for name in ("data", "indices", "indptr"):
        setattr(checked, name, _arrays.read_only(getattr(checked, name)))
    return checked
