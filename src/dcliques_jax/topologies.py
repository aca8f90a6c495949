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
from dcliques_jax._topologies.moving import from_matrices, sequence
from dcliques_jax._topologies.topology import Topology, make_topology

__all__ = [
    "Edges",
    "Topology",
    "d_cliques",
    "diverse_random",
    "from_edges",
    "from_matrices",
    "from_networkx",
    "fully_connected",
    "grid",
    "random_regular",
    "remove_intra_clique_edges",
    "ring",
    "sequence",
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
    >>> from_networkx(nx.circulant_graph(10, [1, 3], create_using=nx.DiGraph))
    Topology('networkx graph', num_nodes=10, arcs=20)
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


def ring(num_nodes: int, *, seed: int = 0) -> Topology:
    """Makes a ring of nodes in random order.

    Args:
      num_nodes: number of nodes.
      seed: seed of the order.

    >>> ring(100).degrees.max()
    np.int64(2)
    """
    num_nodes = _checks.integer("num_nodes", num_nodes, 1)
    order = _random.generator(seed).permutation(num_nodes)
    return make_topology(num_nodes, np.stack([order, np.roll(order, -1)], axis=1), "ring")


def grid(rows: int, columns: int, *, seed: int = 0) -> Topology:
    """Makes a rectangular grid of nodes in random order, with borders.

    Args:
      rows: number of rows.
      columns: number of columns.
      seed: seed of the order.

    >>> grid(10, 10)
    Topology('grid', num_nodes=100, edges=180)
    """
    rows, columns = _checks.integer("rows", rows, 1), _checks.integer("columns", columns, 1)
    nodes = _random.generator(seed).permutation(rows * columns).reshape(rows, columns)
    across = np.stack([nodes[:, :-1], nodes[:, 1:]], axis=-1).reshape(-1, 2)
    down = np.stack([nodes[:-1], nodes[1:]], axis=-1).reshape(-1, 2)
    return make_topology(rows * columns, np.concatenate([across, down]), "grid")


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


def random_regular(num_nodes: int, degree: int, *, seed: int = 0) -> Topology:
    """Makes a random connected graph in which every node has `degree` neighbours.

    Args:
      num_nodes: number of nodes.
      degree: number of neighbours per node. `num_nodes * degree` must be even.
      seed: seed of the graph.

    >>> random_regular(100, 10).degrees.min()
    np.int64(10)
    """
    num_nodes = _checks.integer("num_nodes", num_nodes, 1)
    degree = _checks.integer("degree", degree, 0, num_nodes - 1, "the number of other nodes")
    _check_even(num_nodes, degree)
    rng = _random.generator(seed)
    for _ in range(1000):  # only graphs of degree 2 or less are often disconnected
        edges = _random_regular_edges(num_nodes, degree, rng)
        if _edges.connected_parts(num_nodes, edges)[0] == 1:
            return make_topology(num_nodes, edges, f"random {degree}-regular")
    raise ValueError(f"no connected graph of degree {degree} on {num_nodes} nodes was found: choose a higher degree")


def diverse_random(label_distribution: npt.ArrayLike, degree: int = 10, *, seed: int = 0) -> Topology:
    """Makes a random graph with diverse neighbours (appendix C), for nodes of one class each.

    Every node is linked to one random node of each other class. These edges are the `gradient_edges`:
    `dsgd(clique_averaging=True)` averages "unbiased gradients" over them. Further random edges serve model averaging
    only.

    Args:
      label_distribution: p_i(y) of every node, `[nodes, classes]`, with one class per node.
      degree: number of neighbours per node, at least one for each other class.
      seed: seed of the graph.

    >>> from dcliques_jax import datasets, partitions
    >>> data = partitions.one_class(datasets.synthetic(), 100)
    >>> topology = diverse_random(data.label_distribution)
    >>> len(topology.edges), len(topology.gradient_edges)
    (500, 450)
    """
    p = cliques_lib.check_label_distribution(label_distribution)
    classes = cliques_lib.single_classes(p, "diverse_random")
    num_nodes, labels = len(p), np.unique(classes)
    fewest = len(labels) - 1
    degree = _checks.integer("degree", degree, fewest, num_nodes - 1, "at least one edge to each other class")
    _check_even(num_nodes, degree)
    rng = _random.generator(seed)
    of_class = [np.flatnonzero(classes == label) for label in labels]
    for _ in range(100):  # the first try may fail for a small or dense graph
        matchings = [
            np.stack([of_class[a], rng.permutation(of_class[b])], axis=1)
            for a in range(len(labels))
            for b in range(a + 1, len(labels))
        ]
        diverse = np.concatenate([np.empty((0, 2), np.int64), *matchings])
        further = _random_edges_besides(num_nodes, degree - fewest, diverse, rng)
        edges = np.concatenate([diverse, further])
        if len(further) == num_nodes * (degree - fewest) // 2 and _edges.connected_parts(num_nodes, edges)[0] == 1:
            return make_topology(num_nodes, edges, f"diverse random {degree}-regular", gradient_edges=diverse)
    raise ValueError(f"no such graph with degree={degree} was found for {num_nodes} nodes: choose another degree")


def d_cliques(
    label_distribution: npt.ArrayLike,
    *,
    clique_size: int = 10,
    inter: str = "fully_connected",
    max_steps: int | None = None,
    cliques: npt.ArrayLike | None = None,
    seed: int = 0,
) -> Topology:
    """Makes D-Cliques: cliques that represent the global label distribution, joined by sparse edges.

    Args:
      label_distribution: p_i(y) of every node, `[nodes, classes]`.
      clique_size: largest size M of a clique.
      inter: wiring between cliques: `"ring"`, `"fractal"`, `"small_world"` or `"fully_connected"`. Each edge ends in a
        random one of the nodes that have the fewest inter-clique edges of their clique so far.
      max_steps: steps of Greedy Swap, 0 for random cliques. Defaults to 1000, and to 100 per clique with more than 100
        cliques; see `cliques.greedy_swap`.
      cliques: clique ids `[nodes]` to use instead of running Greedy Swap with `clique_size` and `max_steps`.
      seed: seed of the cliques and of the wiring.

    >>> from dcliques_jax import datasets, partitions
    >>> data = partitions.shards(datasets.synthetic(), 100)
    >>> topology = d_cliques(data.label_distribution, inter="fully_connected")
    >>> topology
    Topology('D-Cliques (fully connected)', num_nodes=100, edges=495, cliques=10)
    """
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
    between = wirings.INTER[inter](members, _random.generator(seed, 3))
    name = f"D-Cliques ({inter.replace('_', ' ')})"
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


def _random_regular_edges(num_nodes: int, degree: int, rng: np.random.Generator) -> np.ndarray:
    import networkx as nx

    sparse = min(degree, num_nodes - 1 - degree)  # a dense graph is the complement of a sparse one
    graph = nx.random_regular_graph(sparse, num_nodes, seed=int(rng.integers(2**32)))
    return np.array((graph if sparse == degree else nx.complement(graph)).edges, np.int64).reshape(-1, 2)


def _random_edges_besides(num_nodes: int, degree: int, taken: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws the edges of a random graph of this degree. Swaps the ends of those in `taken` with random others.

    Edges in `taken` for which no swap is found are left out.
    """
    edges: list[tuple[int, int]] = [(i, j) for i, j in _random_regular_edges(num_nodes, degree, rng).tolist()]
    forbidden = {frozenset(edge) for edge in taken.tolist()}
    used = forbidden | {frozenset(edge) for edge in edges}
    for row in [row for row, edge in enumerate(edges) if frozenset(edge) in forbidden]:
        for other in rng.permutation(len(edges)):
            (a, b), (c, d) = edges[row], edges[other]
            crossed = {frozenset((a, c)), frozenset((b, d))}
            if len({a, b, c, d}) == 4 and not crossed & used:
                used |= crossed
                edges[row], edges[other] = (a, c), (b, d)
                break
    kept = [edge for edge in edges if frozenset(edge) not in forbidden]
    return np.array(kept, np.int64).reshape(-1, 2)


def _check_even(num_nodes: int, degree: int) -> None:
    if num_nodes * degree % 2:
        raise ValueError(f"no graph has {num_nodes} nodes of degree {degree}: one of the two numbers must be even")


def _check_wiring(inter: str, num_cliques: int) -> None:
    if inter == "fully_connected":
        remedy = "choose inter='small_world', 'fractal' or 'ring', or larger cliques"
        _check_all_pairs(num_cliques, "cliques", 10_000_000, remedy)


def _check_all_pairs(count: int, what: str, most: int, remedy: str) -> None:
    edges = count * (count - 1) // 2
    if edges > most:
        raise ValueError(f"an edge for every pair of {count:,} {what} makes {edges:,}, more than {most:,}: {remedy}")
