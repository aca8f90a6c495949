"""What a topology costs and promises, before any training."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy.typing as npt

from dcliques_jax import _checks, mixing
from dcliques_jax._reports import expected, measures
from dcliques_jax._reports.comparison import Comparison
from dcliques_jax._reports.expected import Expected
from dcliques_jax._reports.report import Report
from dcliques_jax.clocks import Clock
from dcliques_jax.faults import Fault
from dcliques_jax.topologies import Topology

__all__ = ["Comparison", "Expected", "Report", "compare", "make_report"]


def make_report(
    topology: Topology,
    label_distribution: npt.ArrayLike | None = None,
    *,
    num_parameters: int | None = None,
    num_devices: int | None = None,
    faults: Fault | Sequence[Fault] | None = None,
    clock: Clock | None = None,
) -> Report:
    """Measures a topology. `topology.report(...)` is the usual way to call it.

    Args:
      topology: any topology.
      label_distribution: p_i(y) of every node, `[nodes, classes]`. The skews and the label bias need it.
      num_parameters: size of the model. The bytes that a node sends need it, at 4 bytes per parameter.
      num_devices: number of devices of a mesh. The traffic of `simulate(mesh=...)` between devices needs it.
      faults: a fault or a list of `dcliques_jax.faults`. What to expect under them needs it.
      clock: one of `dcliques_jax.clocks`. The length of a round, which `num_parameters` is needed for, too.
    """
    if clock is not None and num_parameters is None:
        raise ValueError("the length of a round depends on the size of the model: pass num_parameters, too")
    weights, degrees, ids = topology.weights(), topology.degrees, topology.clique_ids
    kind = mixing.meets(weights)
    speed, extremes = measures.speed(weights, kind)
    size = None if num_parameters is None else 4 * _checks.integer("num_parameters", num_parameters, 0)
    between: dict[str, Any] = (
        {} if num_devices is None else measures.between_devices(topology, weights, num_devices, size)
    )
    return Report(
        **between,
        **speed,
        **measures.labels(topology, weights, label_distribution),
        **measures.distances(topology),
        **measures.traffic(topology, weights, size, clock),
        name=topology.name,
        num_nodes=topology.num_nodes,
        num_edges=len(topology.edges),
        num_arcs=None if topology.arcs is None else len(topology.arcs),
        num_cliques=None if ids is None else int(ids.max()) + 1,
        num_rounds=len(weights.matrices()) if isinstance(weights, mixing.Moving) else 1,
        drawn=topology.drawn,
        matrix=measures.MATRICES[kind],
        edges_per_node=float(degrees.mean()),
        min_edges=int(degrees.min()),
        max_edges=int(degrees.max()),
        expected=expected.under(faults, weights, kind, extremes),
    )


def compare(
    topologies: Sequence[Topology] | Mapping[str, Topology],
    label_distribution: npt.ArrayLike | None = None,
    *,
    num_parameters: int | None = None,
    faults: Fault | Sequence[Fault] | None = None,
) -> Comparison:
    """Measures topologies and puts them side by side.

    Args:
      topologies: topologies, or topologies by their label in the table.
      label_distribution: p_i(y) of every node, `[nodes, classes]`. The skews and the label bias need it.
      num_parameters: size of the model. The bytes that a node sends need it.
      faults: a fault or a list of `dcliques_jax.faults`. The table then shows what to expect under them.

    >>> from dcliques_jax import topologies
    >>> print(compare([topologies.ring(16), topologies.one_peer_exponential(16)]))
    2 topologies of 16 nodes
                                                                         weight
                          messages          W  |lambda2|  contraction  variance
    ring                       2.0  symmetric     0.9493       0.9011    0.2708
    one-peer exponential       1.0   directed          -       0.0000    0.4375
    """
    names = list(topologies) if isinstance(topologies, Mapping) else None
    listed: Any = topologies.values() if isinstance(topologies, Mapping) else topologies
    if not isinstance(listed, Iterable) or not (listed := list(listed)) or not _are_topologies(listed):
        raise ValueError(f"topologies={topologies!r} must be a list of at least one Topology, or a mapping of labels")
    found = [make_report(each, label_distribution, num_parameters=num_parameters, faults=faults) for each in listed]
    if names is not None:
        found = [dataclasses.replace(report, name=str(name)) for name, report in zip(names, found, strict=True)]
    return Comparison(found)


def _are_topologies(listed: list[Any]) -> bool:
    return all(isinstance(topology, Topology) for topology in listed)
