"""Random graphs in which all nodes have equally many neighbours."""

import numpy as np
import numpy.typing as npt

from dcliques_jax import _checks, _edges, _random
from dcliques_jax import cliques as cliques_lib
from dcliques_jax._topologies.topology import Topology, make_topology


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
    check_even(num_nodes, degree)
    rng = _random.generator(seed)
    for _ in range(1000):  # only graphs of degree 2 or less are often disconnected
        edges = random_regular_edges(num_nodes, degree, rng)
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
    check_even(num_nodes, degree)
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


def random_regular_edges(num_nodes: int, degree: int, rng: np.random.Generator) -> np.ndarray:
    """Draws the edges of a random regular graph, `[edges, 2]`, which need not be connected."""
    import networkx as nx

    sparse = min(degree, num_nodes - 1 - degree)  # a dense graph is the complement of a sparse one
    graph = nx.random_regular_graph(sparse, num_nodes, seed=int(rng.integers(2**32)))
    return np.array((graph if sparse == degree else nx.complement(graph)).edges, np.int64).reshape(-1, 2)


def _random_edges_besides(num_nodes: int, degree: int, taken: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws the edges of a random graph of this degree. Swaps the ends of those in `taken` with random others.

    Edges in `taken` for which no swap is found are left out.
    """
    edges: list[tuple[int, int]] = [(i, j) for i, j in random_regular_edges(num_nodes, degree, rng).tolist()]
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


def check_even(num_nodes: int, degree: int) -> None:
    """Raises a `ValueError` unless graphs of this degree exist."""
    if num_nodes * degree % 2:
        raise ValueError(f"no graph has {num_nodes} nodes of degree {degree}: one of the two numbers must be even")
