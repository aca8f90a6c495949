import copy
import dataclasses
import pickle

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from dcliques_jax import mixing, topologies, wirings

# Builders for n nodes in cliques of 10, and: edges per node, fewest, most, |lambda2|, mean distance, diameter.
UNIFORM = np.full((1000, 10), 0.1)


def d_cliques(num_nodes, inter, seed=0):
    return topologies.d_cliques(UNIFORM[:num_nodes], inter=inter, max_steps=0, seed=seed)


GOLDEN = [
    # The second eigenvalue has a tolerance, wide where chance decides which nodes are linked.
    (lambda: d_cliques(100, "ring"), 9.20, 9, 10, (0.99710, 1e-5), 5.85, 11),
    (lambda: d_cliques(100, "fractal"), 9.90, 9, 10, (0.91809, 1e-5), 2.64, 3),
    (lambda: d_cliques(100, "small_world"), 12.14, 11, 13, (0.80192, 0.02), 2.29, 3),
    (lambda: d_cliques(100, "fully_connected"), 9.90, 9, 10, (0.91809, 1e-5), 2.64, 3),
    (lambda: topologies.ring(100), 2, 2, 2, (0.99868, 1e-5), 25.3, 50),
    (lambda: topologies.grid(10, 10), 3.60, 2, 4, (0.97947, 1e-5), 6.67, 18),
    (lambda: topologies.random_regular(100, 10), 10, 10, 10, (0.61333, 0.06), 2.23, 3),
    (lambda: d_cliques(1000, "ring"), 9.20, 9, 10, (0.99997, 1e-5), 50.9, 101),
    (lambda: d_cliques(1000, "fractal"), 9.99, 9, 10, (0.99313, 1e-5), 6.01, 7),
    (lambda: d_cliques(1000, "small_world"), 14.57, 13, 15, (0.83348, 0.02), 3.22, 5),
    # The reference links the last of the least loaded nodes: 0.80 and 2.77. A random one mixes better.
    (lambda: d_cliques(1000, "fully_connected"), 18.90, 18, 19, (0.58, 0.02), 2.71, 3),
    (lambda: topologies.ring(1000), 2, 2, 2, (0.99999, 1e-5), 250, 500),
    (lambda: topologies.random_regular(1000, 10), 10, 10, 10, (0.62859, 0.03), 3.29, 5),
]


@pytest.mark.parametrize(("build", "mean", "least", "most", "eigenvalue", "distance", "diameter"), GOLDEN)
def test_golden_numbers(build, mean, least, most, eigenvalue, distance, diameter):
    topology = build()
    report = topology.report()
    assert report.edges_per_node == pytest.approx(mean, abs=0.06)
    by_chance = eigenvalue[1] > 1e-4
    assert least <= report.min_edges <= least + by_chance
    assert report.max_edges == most
    assert report.second_eigenvalue == pytest.approx(eigenvalue[0], abs=eigenvalue[1])
    assert report.mean_distance == pytest.approx(distance, rel=0.01)
    assert abs(report.diameter - diameter) <= by_chance


def test_edges_at_1000_nodes_as_the_paper_counts_them():
    assert d_cliques(1000, "fully_connected").degrees.mean() == 18.9
    assert 14.5 <= d_cliques(1000, "small_world").degrees.mean() <= 14.6
    full = topologies.fully_connected(1000)
    assert full.degrees.mean() == 999
    assert 1 - 18.9 / 999 > 0.98  # "98 % less edges"


def test_ring_of_cliques_is_that_of_networkx():
    ours = nx.Graph(d_cliques(50, "ring").edges.tolist())
    assert nx.faster_could_be_isomorphic(ours, nx.ring_of_cliques(5, 10))
    assert nx.is_isomorphic(ours, nx.ring_of_cliques(5, 10))


def test_grid_and_ring_are_those_of_networkx():
    assert nx.is_isomorphic(nx.Graph(topologies.grid(4, 6).edges.tolist()), nx.grid_2d_graph(4, 6))
    assert nx.is_isomorphic(nx.Graph(topologies.ring(12).edges.tolist()), nx.cycle_graph(12))


def test_ring_and_grid_place_nodes_by_the_seed():
    for build in (lambda seed: topologies.ring(30, seed=seed), lambda seed: topologies.grid(5, 6, seed=seed)):
        np.testing.assert_array_equal(build(1).edges, build(1).edges)
        assert not np.array_equal(build(1).edges, build(2).edges)


def clique_links(topology):
    ids = topology.clique_ids[topology.edges]
    return np.sort(ids[ids[:, 0] != ids[:, 1]], axis=1)


@pytest.mark.parametrize("seed", range(3))
def test_fully_connected_wiring_has_one_edge_for_every_pair(seed):
    topology = d_cliques(230, "fully_connected", seed)
    links = clique_links(topology)
    assert len(links) == len(np.unique(links, axis=0)) == 23 * 22 // 2


def test_ring_wiring_uses_two_nodes_of_each_clique():
    topology = d_cliques(100, "ring")
    assert np.bincount(topology.clique_ids[topology.degrees == 10]).tolist() == [2] * 10


def test_fractal_wiring_joins_groups_of_groups():
    links = clique_links(d_cliques(1000, "fractal"))
    inside = links[:, 0] // 10 == links[:, 1] // 10
    assert len(np.unique(links[inside], axis=0)) == inside.sum() == 10 * 45
    groups = links[~inside] // 10
    assert len(np.unique(groups, axis=0)) == len(groups) == 45


def test_fractal_groups_are_as_large_as_cliques():
    """16 cliques of 4: four groups with an edge for each of 6 pairs, and 6 edges between groups."""
    topology = topologies.d_cliques(UNIFORM[:64], clique_size=4, inter="fractal", max_steps=0)
    assert len(clique_links(topology)) == 4 * 6 + 6


def test_small_world_wiring_reaches_the_paper_s_offsets():
    links = clique_links(d_cliques(1000, "small_world"))
    apart = (links[:, 1] - links[:, 0]) % 100
    apart = np.minimum(apart, 100 - apart)
    assert set(apart) == {1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 36, 35}  # 64 and 65 are 36 and 35 the other way
    for clique in range(100):
        assert {1, 2, 4, 8, 16, 32} <= set(apart[(links == clique).any(axis=1)])


@pytest.mark.parametrize("inter", wirings.INTER)
def test_loads_are_even_inside_a_clique(inter):
    topology = d_cliques(300, inter)
    between = topology.degrees - 9
    for clique in range(30):
        assert np.ptp(between[topology.clique_ids == clique]) <= (2 if inter == "small_world" else 1)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 30), st.integers(0, 100))
def test_least_loaded_picks_are_valid_one_by_one(loads, count, seed):
    load = np.array(loads)
    nodes = np.arange(len(loads))
    after = load.copy()
    picks = wirings._least_loaded(nodes, after, count, np.random.default_rng(seed))
    follow = iter(picks)
    expected = dict(enumerate(loads))

    def choose(least):
        pick = next(follow)
        assert pick in least
        return int(pick)

    reference.least_loaded_picks(range(len(loads)), expected, count, choose)
    assert after.tolist() == list(expected.values())


def test_least_loaded_picks_are_uniform():
    picks = np.array(
        [wirings._least_loaded(np.arange(3), np.array([0, 0, 1]), 4, np.random.default_rng(s)) for s in range(6000)]
    )
    assert (np.sort(picks[:, :2]) == [0, 1]).all()
    for column, options in [(0, 2), (2, 3)]:
        counts = np.bincount(picks[:, column], minlength=3)[:options]
        assert counts == pytest.approx(6000 / options, rel=0.06)


@pytest.mark.parametrize("degree", [9, 10, 12])
def test_diverse_random_covers_every_class(degree):
    p = np.eye(10)[np.random.default_rng(0).permutation(np.arange(60) % 10)]
    topology = topologies.diverse_random(p, degree, seed=4)
    assert (topology.degrees == degree).all()
    near = reference.neighbours(60, topology.gradient_edges)
    labels = p.argmax(axis=1)
    for node in range(60):
        assert sorted([labels[node], *labels[list(near[node])]]) == list(range(10))


def test_diverse_random_tries_again():
    for seed in range(20):
        topology = topologies.diverse_random(P, seed=seed)
        assert (topology.degrees == 10).all()
        assert (topologies.diverse_random(np.eye(2)[np.arange(20) % 2], 2, seed=seed).degrees == 2).all()
    with pytest.raises(ValueError, match="no such graph with degree=1 was found for 20 nodes"):
        topologies.diverse_random(np.eye(2)[np.arange(20) % 2], 1)


def test_dense_random_graphs_come_out():
    for degree in (49, 90, 99):
        assert (topologies.random_regular(100, degree).degrees == degree).all()


@pytest.mark.parametrize("per_clique", [0, 1, 5])
def test_edge_removal(per_clique):
    whole = d_cliques(100, "fully_connected")
    topology = topologies.remove_intra_clique_edges(whole, per_clique, seed=3)
    assert len(topology.edges) == len(whole.edges) - 10 * per_clique
    assert {*map(tuple, topology.edges)} <= {*map(tuple, whole.edges)}
    removed = np.bincount(whole.clique_ids[whole.edges[:, 0]]) - np.bincount(topology.clique_ids[topology.edges[:, 0]])
    assert removed.tolist() == [per_clique] * 10
    np.testing.assert_array_equal(clique_links(topology), clique_links(whole))
    # Gradients: a node and the clique-mates it still touches, uniformly; models: Metropolis-Hastings of what is left.
    inside = topology.edges[np.equal(*topology.clique_ids[topology.edges].T)]
    np.testing.assert_allclose(
        mixing.clique_average(topology).to_dense(), reference.neighbourhood_average(100, inside), atol=1e-12
    )
    np.testing.assert_allclose(
        mixing.metropolis_hastings(topology).to_dense(), reference.metropolis_hastings(100, topology.edges), atol=1e-12
    )


@pytest.mark.parametrize("n", [1, 2, 3])
def test_few_nodes_work_everywhere(n):
    one = np.ones((n, 1))
    built = [topologies.ring(n), topologies.grid(1, n), topologies.fully_connected(n), topologies.from_edges(1, [])]
    built += [topologies.d_cliques(one, clique_size=size, inter=inter) for size in (1, n) for inter in wirings.INTER]
    built += [topologies.random_regular(1, 0), topologies.diverse_random(np.eye(n), n - 1)]
    for topology in built:
        dense = mixing.metropolis_hastings(topology).to_dense()
        np.testing.assert_allclose(dense.sum(axis=0), 1, atol=1e-12)
        assert str(topology.report())


def test_from_networkx_keeps_the_order_of_nodes():
    graph = nx.Graph([("c", "a"), ("a", "b")])
    assert list(graph.nodes) == ["c", "a", "b"]
    assert topologies.from_networkx(graph).edges.tolist() == [[0, 1], [1, 2]]


P = np.eye(10)[np.arange(20) % 10]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: topologies.from_edges(4, [[0, 1], [2, 3]]), "disconnected: it falls into 2 parts.*node 2"),
        (lambda: topologies.from_networkx(nx.empty_graph(3)), "disconnected"),
        (lambda: topologies.from_networkx(nx.DiGraph([(0, 1)])), "not strongly connected.*node 0 to node 1"),
        (lambda: topologies.from_matrices([np.eye(3), np.eye(4)]), "matrix 1 is for 4 nodes, matrix 0 for 3"),
        (lambda: topologies.from_matrices(5), "must be a matrix .* or a list of matrices"),
        (lambda: topologies.from_matrices([]), "pass at least one"),
        (lambda: topologies.from_matrices(np.full((4, 4), 0.25), clique_ids=[0] * 4, drawn=True), "no fixed cliques"),
        (lambda: topologies.sequence(topologies.ring(4)), "must be a list of at least one Topology"),
        (lambda: topologies.sequence([]), "at least one Topology"),
        (lambda: topologies.from_edges(2, [[0, 2]]), r"edge \[0, 2\] leaves the nodes 0\.\.1"),
        (lambda: topologies.from_edges(2, [[0, 0]]), r"edge \[0, 0\] links a node with itself"),
        (lambda: topologies.from_edges(2, [[0.0, 1.0]]), "pairs of integers"),
        (lambda: topologies.from_edges(2, [0, 1]), "pairs of integers"),
        (lambda: topologies.from_edges(0, []), "num_nodes=0"),
        (lambda: topologies.from_edges(2, [[0, 1]], clique_ids=[0]), "one integer for each of 2 nodes"),
        (lambda: topologies.ring(0), "num_nodes=0"),
        (lambda: topologies.grid(0, 3), "rows=0"),
        (lambda: topologies.fully_connected(-1), "num_nodes=-1"),
        (
            lambda: topologies.fully_connected(100_000),
            "every pair of 100,000 nodes makes 4,999,950,000.*a sparser topology",
        ),
        (lambda: topologies.random_regular(5, 3), "no graph has 5 nodes of degree 3"),
        (lambda: topologies.random_regular(4, 4), r"degree=4 must be an integer in 0\.\.3"),
        (lambda: topologies.random_regular(6, 1), "no connected graph of degree 1 on 6 nodes"),
        (lambda: topologies.diverse_random(np.full((20, 10), 0.1)), "hold one class each"),
        (lambda: topologies.diverse_random(P, 8), r"degree=8 must be an integer in 9\.\.19"),
        (lambda: topologies.d_cliques(P, inter="star"), "inter='star' is unknown.*ring, fractal, small_world"),
        (
            lambda: topologies.d_cliques(np.ones((5000, 1)), clique_size=1, max_steps=0),
            "every pair of 5,000 cliques makes 12,497,500, more than 10,000,000: choose inter='small_world'",
        ),
        (
            lambda: mixing.metropolis_hastings(topologies.from_networkx(nx.star_graph(20_000))),
            "a node has 20000 neighbours.*that of 20,001 nodes takes 3 GB",
        ),
        (lambda: topologies.d_cliques(P, clique_size=21), r"clique_size=21 must be an integer in 1\.\.20"),
        (lambda: topologies.d_cliques(P, cliques=np.zeros(3, int)), "one integer for each of 20 nodes"),
        (lambda: topologies.remove_intra_clique_edges(topologies.ring(5), 1), "has no cliques"),
        (
            lambda: topologies.remove_intra_clique_edges(topologies.d_cliques(P), 46),
            r"per_clique=46 must be an integer in 0\.\.45",
        ),
        (lambda: topologies.remove_intra_clique_edges(topologies.d_cliques(P), 45), "disconnected"),
    ],
)
def test_impossible_topologies_are_refused(build, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        build()


def test_notebooks_show_a_small_table():
    page = topologies.from_edges(3, [[0, 1], [1, 2]], name="<b>")._repr_html_()
    assert "<b>" not in page
    for text in ("&lt;b&gt;", "nodes", "3", "edges", "2", "edges per node", "1.33 (1 to 2)"):
        assert f">{text}</" in page
    assert "cliques" not in page
    cliques_page = topologies.d_cliques(np.eye(2)[np.arange(5) % 2], clique_size=2)._repr_html_()
    assert ">3 of 1 to 2 nodes</td>" in cliques_page
    assert len(topologies.ring(1000)._repr_html_()) < 1000


EDGES = np.array([[0, 1], [1, 2], [2, 3]])
IDS = np.array([0, 0, 1, 1])
INSIDE = np.array([[0, 1], [2, 3]])


def by_hand(**change):
    parts = {"num_nodes": 4, "edges": EDGES, "clique_ids": IDS, "gradient_edges": INSIDE, "name": "line"}
    return topologies.Topology(**(parts | change))


def spoil(array):
    array += 1


def test_topologies_cannot_be_changed():
    made = by_hand()
    again = [copy.copy(made), copy.deepcopy(made), pickle.loads(pickle.dumps(made)), dataclasses.replace(made)]
    again += [d_cliques(20, "ring"), topologies.from_edges(4, EDGES, clique_ids=IDS), topologies.diverse_random(P)]
    for topology in (made, *again, topologies.fully_connected(4), topologies.ring(5)):
        for array in (topology.edges, topology.clique_ids, topology.gradient_edges):
            if array is not None:
                with pytest.raises(ValueError, match="read-only"):
                    spoil(array)
        for compute in (lambda t: t.degrees, lambda t: t.adjacency().data):  # anew each time
            before = compute(topology).copy()
            spoil(compute(topology))
            np.testing.assert_array_equal(compute(topology), before)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint16, ">i8"])
def test_topologies_do_not_follow_the_arrays_they_were_made_of(dtype):
    edges, ids, inside = (array.astype(dtype) for array in (EDGES, IDS, INSIDE))
    made = by_hand(edges=edges, clique_ids=ids, gradient_edges=inside), topologies.from_edges(4, edges, clique_ids=ids)
    for array in (edges, ids, inside):
        spoil(array)
    for topology in made:
        np.testing.assert_array_equal(topology.edges, EDGES)
        np.testing.assert_array_equal(topology.clique_ids, IDS)
        np.testing.assert_array_equal(topology.gradient_edges, INSIDE)
        assert topology.edges.dtype == topology.clique_ids.dtype == topology.gradient_edges.dtype == np.int64


def test_millions_of_edges_are_not_copied():
    edges = topologies.fully_connected(300).edges
    assert topologies.Topology(300, edges, None, None, "full").edges is edges


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_nodes": 0}, "num_nodes=0 must be an integer"),
        ({"name": None}, "name=None must be a string"),
        ({"edges": [[0, 1], [1, 2], [2, 4]]}, r"edge \[2, 4\] leaves the nodes 0\.\.3"),
        ({"edges": [[-1, 1], [1, 2], [2, 3]]}, r"edge \[-1, 1\] leaves the nodes"),
        ({"edges": [[0, 1], [1, 1], [1, 2], [2, 3]]}, r"edge \[1, 1\] links a node with itself"),
        ({"edges": [[0, 1], [1, 2], [1, 2], [2, 3]]}, r"edges must be listed once.*\[\[1, 2\], \[1, 2\]\] at 1"),
        ({"edges": [[0, 1], [2, 3], [1, 2]]}, r"edges must be listed once.*\[\[2, 3\], \[1, 2\]\] at 1.*from_edges"),
        ({"edges": [[0, 1], [1, 2], [3, 2]]}, r"edges must be listed once.*the smaller node first.*\[\[3, 2\]\] at 2"),
        ({"edges": [[0.0, 1.0]]}, "edges must be pairs of integers"),
        ({"edges": [0, 1]}, "edges must be pairs of integers"),
        ({"edges": None}, "edges must be pairs of integers"),
        ({"arcs": [[0, 1], [1, 0], [0, 5]]}, r"edge \[0, 5\] leaves the nodes"),
        ({"arcs": [[0.5, 1]]}, "arcs must be pairs of integers"),
        ({"edges": INSIDE}, "the line of 4 nodes is disconnected: it falls into 2 parts"),
        ({"edges": []}, "disconnected"),
        ({"clique_ids": [0, 0, 1]}, "clique_ids must be one integer for each of 4 nodes"),
        ({"clique_ids": [0, 0, 2, 2]}, "clique_ids must be 0 .. cliques - 1"),
        ({"clique_ids": IDS.astype(float)}, "clique_ids must be one integer"),
        ({"gradient_edges": [[0, 1], [1, 3]]}, r"gradient edge \[1, 3\] is not one of the edges"),
        ({"gradient_edges": EDGES}, r"gradient edge \[1, 2\] links two cliques"),
        ({"gradient_edges": INSIDE[::-1]}, "gradient_edges must be listed once"),
        ({"gradient_edges": [[0, 4]]}, "leaves the nodes"),
        ({"gradient_edges": None}, "gradient_edges=None with clique_ids.*from_edges"),
    ],
)
def test_topologies_made_by_hand_are_checked(change, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        by_hand(**change)


def test_edges_are_checked_throughout():
    """Also where checks go through the edges in parts, at every place where one part may end and another begin."""
    edges = topologies.fully_connected(300).edges  # 44,850
    for place in (0, 1, 2**14 - 1, 2**14, 2**14 + 1, len(edges) - 2):
        swapped = edges.copy()
        swapped[[place, place + 1]] = edges[[place + 1, place]]
        with pytest.raises(ValueError, match=f"in order, but hold .* at {place}"):
            topologies.Topology(300, swapped, None, None, "full")
        twice = np.insert(edges, place, edges[place], axis=0)
        with pytest.raises(ValueError, match=f"listed once each.* at {place}"):
            topologies.Topology(300, twice, None, None, "full")


@pytest.mark.parametrize("form", [list, tuple, set, frozenset, iter, dict.fromkeys, lambda edges: (e for e in edges)])
def test_edges_come_in_any_form(form):
    pairs = [(2, 1), (0, 1), (3, 2)]
    np.testing.assert_array_equal(topologies.from_edges(4, form(pairs)).edges, EDGES)
    weights = mixing.neighbourhood_average(4, form(pairs)).to_dense()
    np.testing.assert_allclose(weights, reference.neighbourhood_average(4, EDGES), atol=1e-12)
    assert len(topologies.from_edges(1, form([])).edges) == 0


@pytest.mark.parametrize("edges", [[(0, 1), (1, 2, 3)], {frozenset((0, 1))}, "ab", [None], 7])
def test_edges_that_are_no_pairs_are_refused(edges):
    with pytest.raises(ValueError, match="edges must be pairs of integers"):
        topologies.from_edges(4, edges)
