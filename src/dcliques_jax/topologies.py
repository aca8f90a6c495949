"""Who talks to whom.

Every builder returns a `Topology` over nodes 0 .. n - 1: a connected graph, or gossip matrices of its own that may
change from round to round. Builders run on the host with NumPy. They see label distributions `[nodes, classes]` instead
of data.
"""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from dcliques_jax import _arrays, _checks, _edges, _random, wirings
from dcliques_jax import cliques as cliques_lib
from dcliques_jax._topologies.base import base_graph
from dcliques_jax._topologies.drawn import epidemic, random_matchings
from dcliques_jax._topologies.exponential import exponential, one_peer_exponential
from dcliques_jax._topologies.lattices import grid, hypercube, ring, torus
from dcliques_jax._topologies.moving import from_matrices, sequence
from dcliques_jax._topologies.random_graphs import diverse_random, random_regular
from dcliques_jax._topologies.stl_fw import stl_fw
from dcliques_jax._topologies.topology import Topology, make_topology

__all__ = [
    "Edges",
    "Topology",
    "base_graph",
    "d_cliques",
    "diverse_random",
    "epidemic",
    "exponential",
    "from_edges",
    "from_matrices",
    "from_networkx",
    "fully_connected",
    "grid",
    "hypercube",
    "one_peer_exponential",
    "random_matchings",
    "random_regular",
    "remove_intra_clique_edges",
    "ring",
    "sequence",
    "stl_fw",
    "torus",
]

Edges = _edges.Edges
"""Undirected edges: an array `[edges, 2]`, or a list, set or generator of pairs of nodes."""


def from_edges(
    num_nodes: int, edges: Edges, *, clique_ids: npt.ArrayLike | None = None, name: str = "graph"
) -> Topology:
    """Makes a topology from undirected edges.

    Args:
      num_nodes: number of nodes.
      edges: pairs of nodes in any order. Duplicates count once.
      clique_ids: the clique of each node, `[nodes]`. The edges inside cliques become the `gradient_edges`.
      name: name in reports and pictures.

    >>> from_edges(3, [[0, 1], [1, 2], [2, 1]])
    Topology('graph', num_nodes=3, edges=2)
    """
    num_nodes = _checks.integer("num_nodes", num_nodes, 1)
    pairs = _arrays.frozen(_edges.checked(num_nodes, edges))
    if clique_ids is None:
        return Topology(num_nodes, pairs, None, None, name)
    ids = cliques_lib.check_clique_ids(clique_ids, num_nodes)
    return Topology(num_nodes, pairs, ids, pairs[np.equal(*ids[pairs].T)], name)


def from_networkx(graph: Any, *, name: str = "networkx graph") -> Topology:
    """Makes a topology from a networkx graph.

    Args:
      graph: the graph. Its nodes become 0 .. n - 1 in the order of `graph.nodes`. In a directed graph, i sends to j
        along the edge (i, j).
      name: name in reports and pictures.

    >>> import networkx as nx
    >>> from_networkx(nx.petersen_graph())
    Topology('networkx graph', num_nodes=10, edges=15)
    >>> from_networkx(nx.cycle_graph(10, create_using=nx.DiGraph))
    Topology('networkx graph', num_nodes=10, arcs=10)
    """
    number = {node: position for position, node in enumerate(graph.nodes)}
    pairs = [(number[i], number[j]) for i, j in graph.edges()]
    topology = from_edges(len(number), pairs, name=name)
    if not graph.is_directed():
        return topology
    arcs = _edges.arcs_in_order(len(number), np.array(pairs, np.int64).reshape(-1, 2))
    if len(arcs) == 2 * len(topology.edges):
        return topology
    _edges.check_strongly_connected(len(number), arcs, name)
    return dataclasses.replace(topology, arcs=arcs)


def fully_connected(num_nodes: int) -> Topology:
    """Links every node to every other: the ideal and costliest baseline. One node is the centralised case.

    >>> fully_connected(100)
    Topology('fully connected', num_nodes=100, edges=4950)
    """
    num_nodes = _checks.integer("num_nodes", num_nodes, 1)
    _check_all_pairs(num_nodes, "nodes", 100_000_000, "choose a sparser topology, such as d_cliques or random_regular")
    nodes = np.arange(num_nodes)
    smaller = np.repeat(nodes, nodes[::-1])
    larger = np.concatenate([nodes[node + 1 :] for node in nodes])
    edges = np.stack([smaller, larger], axis=1)  # built in order, because sorting would take longest
    return Topology(num_nodes, _arrays.frozen(edges), None, None, "fully connected")


def d_cliques(
    label_distribution: npt.ArrayLike,
    *,
    clique_size: int = 10,
    inter: str | wirings.Wiring = "fully_connected",
    max_steps: int | None = None,
    cliques: npt.ArrayLike | None = None,
    seed: int = 0,
) -> Topology:
    """Makes D-Cliques: cliques that represent the global label distribution, joined by sparse edges.

    Args:
      label_distribution: p_i(y) of every node, `[nodes, classes]`.
      clique_size: largest size M of a clique.
      inter: wiring between cliques: `"ring"`, `"fractal"`, `"small_world"` or `"fully_connected"`. Each edge ends in a
        random one of the nodes that have the fewest inter-clique edges of their clique so far. Or a function
        `(members, rng) -> edges` that takes the nodes of each clique and a NumPy generator and returns pairs of nodes
        of different cliques, `[edges, 2]`.
      max_steps: steps of Greedy Swap, 0 for random cliques. Defaults to 1000, and to 100 per clique with more than 100
        cliques; see `cliques.greedy_swap`.
      cliques: clique ids `[nodes]` to use instead of running Greedy Swap with `clique_size` and `max_steps`.
      seed: seed of the cliques and of the wiring.

    >>> from dcliques_jax import datasets, partitions
    >>> data = partitions.shards(datasets.synthetic(), 100)
    >>> topology = d_cliques(data.label_distribution, inter="fully_connected")
    >>> topology
    Topology('D-Cliques (fully connected)', num_nodes=100, edges=495, cliques=10)
    >>> def line_of_cliques(members, rng):
    ...     return [(rng.choice(a), rng.choice(b)) for a, b in zip(members, members[1:])]
    >>> d_cliques(data.label_distribution, inter=line_of_cliques)
    Topology('D-Cliques (line of cliques)', num_nodes=100, edges=459, cliques=10)
    """
    if not callable(inter):
        _checks.choice("inter", inter, tuple(wirings.INTER))
    p = cliques_lib.check_label_distribution(label_distribution)
    if cliques is None:
        clique_size = _checks.integer("clique_size", clique_size, 1, len(p), "the number of nodes")
        _check_wiring(inter, -(-len(p) // clique_size))  # before Greedy Swap, which may take a while
        ids = cliques_lib.greedy_swap(p, clique_size, max_steps=max_steps, seed=seed)
    else:
        ids = cliques_lib.check_clique_ids(cliques, len(p))
        _check_wiring(inter, int(ids.max()) + 1)
    members = cliques_lib.members(ids)
    inside = np.concatenate([nodes[np.stack(np.triu_indices(len(nodes), 1), axis=1)] for nodes in members])
    wiring, wiring_name = _wiring(inter)
    between = _edges.checked(len(p), wiring(members, _random.generator(seed, 3)))
    if (within := between[np.equal(*ids[between].T)]).size:
        raise ValueError(
            f"inter={wiring_name} returns the edge {within[0].tolist()} inside clique {ids[within[0, 0]]}: return "
            "pairs of nodes of different cliques"
        )
    name = f"D-Cliques ({wiring_name.replace('_', ' ')})"
    return make_topology(len(p), np.concatenate([inside, between]), name, ids, inside)


def remove_intra_clique_edges(topology: Topology, per_clique: int, *, seed: int = 0) -> Topology:
    """Removes random edges inside every clique. The rest of these edges are the `gradient_edges`.

    Args:
      topology: a topology with cliques.
      per_clique: number of undirected edges to remove from each clique.
      seed: seed of the choice.

    >>> from dcliques_jax import datasets, partitions
    >>> data = partitions.shards(datasets.synthetic(), 100)
    >>> remove_intra_clique_edges(d_cliques(data.label_distribution), 5)
    Topology('D-Cliques (fully connected), edges removed per clique: 5', num_nodes=100, edges=445, cliques=10)
    """
    ids = topology.clique_ids
    if ids is None:
        raise ValueError(f"{topology!r} has no cliques to remove edges from")
    first, second = ids[topology.edges].T
    rng = _random.generator(seed)
    kept = np.ones(len(topology.edges), bool)
    inside = np.flatnonzero(first == second)
    inside = inside[np.argsort(first[inside], kind="stable")]  # clique by clique
    counts = np.bincount(first[inside], minlength=ids.max() + 1)
    for clique, removable in enumerate(np.split(inside, np.cumsum(counts)[:-1])):
        per_clique = _checks.integer("per_clique", per_clique, 0, len(removable), f"the edges inside clique {clique}")
        kept[rng.choice(removable, per_clique, replace=False)] = False
    name = f"{topology.name}, edges removed per clique: {per_clique}"
    return from_edges(topology.num_nodes, topology.edges[kept], clique_ids=ids, name=name)


def _wiring(inter: str | wirings.Wiring) -> tuple[wirings.Wiring, str]:
    """Returns a wiring and its name."""
    return (
        (inter, getattr(inter, "__name__", type(inter).__name__)) if callable(inter) else (wirings.INTER[inter], inter)
    )


def _check_wiring(inter: str | wirings.Wiring, num_cliques: int) -> None:
    if inter == "fully_connected":
        remedy = "choose inter='small_world', 'fractal' or 'ring', or larger cliques"
        _check_all_pairs(num_cliques, "cliques", 10_000_000, remedy)


def _check_all_pairs(count: int, what: str, most: int, remedy: str) -> None:
    edges = count * (count - 1) // 2
    if edges > most:
        raise ValueError(f"an edge for every pair of {count:,} {what} makes {edges:,}, more than {most:,}: {remedy}")
