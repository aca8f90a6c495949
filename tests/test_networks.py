"""Topologies beyond the paper: exact products, spectra and contractions, against numbers computed independently.

J is the matrix 11^T/n, which replaces every model by the mean.
"""

import math
import pathlib
import re

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcliques_jax import algorithms, partitions, topologies
from dcliques_jax._topologies import base, stl_fw

PAGE = (pathlib.Path(__file__).parent.parent / "docs" / "networks.md").read_text()


def dense(topology):
    return [matrix.toarray() for matrix in topology.weights().matrices()]


def distance_from_mean(matrix):
    """||W - J||, the largest factor by which differences from the mean remain."""
    difference = matrix - 1 / len(matrix)
    return np.sqrt(np.linalg.eigvalsh(difference.T @ difference)[-1])


def product(matrices):
    result = np.eye(len(matrices[0]))
    for matrix in matrices:
        result = matrix @ result
    return result


def messages(matrix):
    """Messages per node."""
    return np.count_nonzero(matrix - np.diag(np.diag(matrix))) / len(matrix)


def largest_degree(matrix):
    others = (matrix != 0) & ~np.eye(len(matrix), dtype=bool)
    return max(others.sum(axis=0).max(), others.sum(axis=1).max())


# Exponential graphs


@pytest.mark.parametrize(("n", "norm"), [(16, 0.6), (100, 0.75), (1000, 0.8181818)])
def test_exponential_mixes_as_known(n, norm):
    (w,) = dense(topologies.exponential(n))
    assert distance_from_mean(w) == pytest.approx(norm, abs=1e-6)
    assert messages(w) == math.ceil(math.log2(n))


@pytest.mark.parametrize("n", range(1, 20))
def test_exponential_by_its_definition(n):
    tau = math.ceil(math.log2(n))
    expected, peers = np.eye(n) / (tau + 1), []
    for m in range(tau):
        read = np.eye(n)[(np.arange(n) + 2**m) % n]
        expected += read / (tau + 1)
        peers.append((np.eye(n) + read) / 2)
    order = np.random.default_rng([5]).permutation(n)
    (found,) = dense(topologies.exponential(n, seed=5))
    np.testing.assert_allclose(found[np.ix_(order, order)], expected, atol=1e-15)
    for matrix, peer in zip(dense(topologies.one_peer_exponential(n, seed=5)), peers or [np.eye(1)], strict=True):
        np.testing.assert_array_equal(matrix[np.ix_(order, order)], peer)


@pytest.mark.parametrize("n", [1, 2, 8, 64])
def test_one_peer_exponential_is_exact_for_powers_of_two(n):
    matrices = dense(topologies.one_peer_exponential(n))
    for start in range(len(matrices)):
        assert np.abs(product(matrices[start:] + matrices[:start]) - 1 / n).max() == 0


@pytest.mark.parametrize(("n", "once", "twice"), [(100, 0.1916, 0.0367), (1000, 0.0234, 5.5e-4)])
def test_one_peer_exponential_comes_close_to_the_mean(n, once, twice):
    topology = topologies.one_peer_exponential(n)
    assert topology.degrees.max() <= 2 * len(topology.matrices)
    period = product([matrix.toarray() for matrix in topology.matrices])
    assert distance_from_mean(period) == pytest.approx(once, rel=2e-3)
    assert distance_from_mean(period @ period) == pytest.approx(twice, rel=5e-3)
    assert all(messages(matrix.toarray()) == 1 for matrix in topology.matrices)


# Tori, hypercubes and graphs of networkx


@pytest.mark.parametrize(
    ("build", "second", "least"),
    [
        (lambda: topologies.torus(4, 4), 0.6, -0.6),
        (lambda: topologies.torus(10, 10), 0.92361, -0.6),
        (lambda: topologies.hypercube(16), 0.6, -0.6),
        (lambda: topologies.hypercube(64), 0.71429, -0.71429),
        (lambda: topologies.from_networkx(nx.star_graph(99)), 0.99, 0),
    ],
)
def test_spectra(build, second, least):
    eigenvalues = np.linalg.eigvalsh(build().weights().to_dense())
    assert eigenvalues[-2] == pytest.approx(second, abs=1e-5)
    assert eigenvalues[0] == pytest.approx(least, abs=1e-5)


# Ranges over seeds 0 .. 9: second and least eigenvalue.
RANDOM_GRAPHS = {
    "Erdos-Renyi": (lambda seed: nx.gnp_random_graph(100, 0.1, seed=seed), (0.735, 0.864), (-0.313, -0.254)),
    "Watts-Strogatz": (lambda seed: nx.watts_strogatz_graph(100, 10, 0.1, seed=seed), (0.904, 0.930), (-0.28, -0.23)),
    "Barabasi-Albert": (lambda seed: nx.barabasi_albert_graph(100, 5, seed=seed), (0.81, 0.975), (-0.14, -0.108)),
    "regular": (lambda seed: nx.random_regular_graph(10, 100, seed=seed), (0.56, 0.62), (-0.46, -0.40)),
}


@pytest.mark.parametrize("name", RANDOM_GRAPHS)
def test_spectra_of_random_graphs(name):
    build, second, least = RANDOM_GRAPHS[name]
    for seed in range(10):
        eigenvalues = np.linalg.eigvalsh(topologies.from_networkx(build(seed)).weights().to_dense())
        assert second[0] <= eigenvalues[-2] <= second[1]
        assert least[0] <= eigenvalues[0] <= least[1]


def test_torus_and_hypercube_are_those_of_networkx():
    grid = nx.grid_2d_graph(3, 5, periodic=True)
    assert nx.is_isomorphic(nx.Graph(topologies.torus(3, 5).edges.tolist()), grid)
    assert nx.is_isomorphic(nx.Graph(topologies.hypercube(16).edges.tolist()), nx.hypercube_graph(4))
    assert [len(topologies.hypercube(n).edges) for n in (1, 2, 4)] == [0, 1, 4]


# Base-(k+1)

SIZES = (5, 6, 7, 10, 25, 100, 1000)
# k: rounds of the simple sequence, rounds, messages per node over a period, for every size.
BASE = {
    1: ((5, 5, 5, 7, 9, 13, 19), (5, 4, 5, 6, 9, 11, 16), (4.00, 3.00, 4.29, 5.00, 8.64, 10.64, 15.90)),
    2: ((3, 2, 4, 5, 6, 9, 13), (3, 2, 4, 4, 6, 8, 12), (4.00, 3.00, 5.71, 5.00, 9.68, 11.68, 19.62)),
    4: ((1, 2, 3, 2, 2, 3, 5), (1, 2, 3, 2, 2, 3, 5), (4.00, 3.00, 7.71, 5.00, 8.00, 11.00, 16.00)),
}


@pytest.mark.parametrize("k", BASE)
def test_base_graph_has_the_known_lengths_and_messages(k):
    simple, rounds, sent = BASE[k]
    assert tuple(len(base.simple_base(np.arange(n), k + 1)) for n in SIZES) == simple
    built = [topologies.base_graph(n, k).matrices for n in SIZES]
    assert tuple(map(len, built)) == rounds
    links = [sum(m.nnz - np.count_nonzero(m.diagonal()) for m in matrices) for matrices in built]
    assert tuple(round(count / n, 2) for count, n in zip(links, SIZES, strict=True)) == sent


@pytest.mark.parametrize("k", range(1, 6))
def test_base_rounds_reach_the_mean_of_any_number_of_nodes(k):
    """The construction, for all n. Rounds are applied to the identity, so that no matrix is built."""
    for n in range(1, 80):
        rounds, reached = base.base(np.arange(n), k + 1), np.eye(n)
        assert len(rounds) <= 2 * math.log(n, k + 1) + 2
        for meetings in rounds:
            change, met = np.zeros((n, n)), np.zeros(n, int)
            for pairs, weight in meetings:
                i, j = pairs.T
                np.add.at(change, i, weight * (reached[j] - reached[i]))
                np.add.at(change, j, weight * (reached[i] - reached[j]))
                met += np.bincount(pairs.ravel(), minlength=n)
            assert met.max(initial=0) <= k
            reached = reached + change
        assert np.abs(reached - 1 / n).max() <= 1e-14, n


@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (2, 1), (3, 1), (7, 2), (23, 1), (79, 3), (100, 1), (100, 4), (1000, 1), (1000, 2), (1000, 5)]
)
def test_base_graph_is_exact(n, k):
    matrices = topologies.base_graph(n, k, seed=n).matrices
    reached = np.eye(n)
    for matrix in matrices:
        assert abs(matrix - matrix.T).max() <= 1e-15
        assert np.abs(matrix.sum(axis=0) - 1).max() <= 1e-14
        assert matrix.data.min() > 0
        assert np.diff(matrix.indptr).max() <= k + 1  # with the diagonal
        reached = matrix @ reached
    assert np.abs(reached - 1 / n).max() <= 1e-14


def test_factors_are_the_fewest():
    assert base.factorisation(216, 8) == (6, 6, 6)  # largest first would be 8, 3, 3, 3
    assert base.factorisation(648, 8) == (3, 6, 6, 6)
    assert len(topologies.base_graph(216, 7).matrices) == 3
    assert len(topologies.base_graph(648, 7).matrices) == 4
    assert len(topologies.base_graph(243, 2).matrices) == 5  # math.log(243, 3) is below 5
    assert base.factorisation(1, 2) == ()
    assert base.factorisation(22, 10) is None


@given(st.integers(1, 300), st.integers(2, 9))
def test_factors_multiply_to_the_number(number, most):
    factors = base.factorisation(number, most)
    primes = [p for p in range(2, number + 1) if number % p == 0 and all(p % d for d in range(2, p))]
    assert (factors is None) == (max(primes, default=1) > most)
    if factors is not None:
        assert math.prod(factors) == number
        assert list(factors) == sorted(factors)
        assert max(factors, default=0) <= most


# Graphs drawn in every round


def expected_contraction(matrices):
    """The mean of |W X - 1 x^T|^2 / |X - 1 x^T|^2 over random places of the nodes, where x is the mean."""
    n = matrices[0].shape[0]
    return np.mean([(np.sum(matrix.data**2) - 1) / (n - 1) for matrix in matrices])


def local_contraction(n, s):
    return (1 - (1 - s / (n - 1)) ** n) / s - 1 / (n - 1)


def test_random_matchings_contract_as_known():
    for n, contraction in [(100, 0.494949), (1000, 0.49950)]:
        topology = topologies.random_matchings(n)
        assert expected_contraction(topology.matrices) == pytest.approx((n - 2) / (2 * (n - 1)))
        assert expected_contraction(topology.matrices) == pytest.approx(contraction, abs=1e-5)


@pytest.mark.parametrize(
    ("n", "s", "oracle", "local"),
    [
        (100, 1, 0.49495, 0.62758),
        (100, 5, 0.15825, 0.18878),
        (100, 10, 0.08173, 0.08990),
        (1000, 1, 0.49950, 0.63167),
        (1000, 5, 0.16583, 0.19767),
        (1000, 10, 0.09000, 0.09899),
    ],
)
def test_epidemic_learning_contracts_as_known(n, s, oracle, local):
    assert expected_contraction(topologies.epidemic(n, s).matrices) == pytest.approx(oracle, abs=1e-5)
    assert local_contraction(n, s) == pytest.approx(local, abs=1e-5)
    pool = topologies.epidemic(n, s, local=True).matrices
    assert expected_contraction(pool) == pytest.approx(local, rel=0.05 if n == 100 else 0.02)


@pytest.mark.parametrize(("s", "drift"), [(1, 1e-3), (10, 1e-4)])
def test_the_mean_drifts_in_local_epidemics(s, drift):
    n, topology = 100, topologies.epidemic(100, s, local=True)
    found = np.mean([np.sum((matrix.sum(axis=0) - 1) ** 2) / (n * (n - 1)) for matrix in topology.matrices])
    assert found == pytest.approx(drift, rel=0.3)
    for matrix in topology.matrices:
        sent = np.diff(matrix.tocsc().indptr) - 1
        assert (sent == s).all()  # every node sends s messages
        received = np.diff(matrix.indptr)
        np.testing.assert_allclose(matrix.data, np.repeat(1 / received, received))


def contraction_by_permutations(topology, repeats=40):
    """Monte Carlo in NumPy, over random places of the nodes."""
    rng = np.random.default_rng(1)
    n, ratios = topology.num_nodes, []
    x = rng.normal(size=(n, 4))
    x -= x.mean(axis=0)
    for _ in range(repeats):
        for matrix in topology.matrices:
            ratios.append(np.sum((matrix @ x[rng.permutation(n)]) ** 2) / np.sum(x**2))
    return np.mean(ratios)


def of_rounds(topology, rounds, x):
    """Multiplies x by the matrices that a run draws in its rounds, `[rounds, nodes, ...]`."""
    nodes = jnp.arange(topology.num_nodes)

    def multiplied(weights, number):
        key = jax.random.fold_in(jax.random.key(2, impl="threefry2x32"), number)
        return weights.at(algorithms.Round(number, key, nodes, lambda params: params)).apply(x)

    run = jax.jit(lambda weights, numbers: jax.lax.map(lambda number: multiplied(weights, number), numbers))
    return run(topology.weights(), jnp.arange(rounds))


def contraction_by_rounds(topology, rounds=1500):
    """Monte Carlo through the matrices of rounds, as a run draws them."""
    x = jax.random.normal(jax.random.key(1), (topology.num_nodes, 4))
    x -= x.mean(axis=0, keepdims=True)

    mixed = of_rounds(topology, rounds, x)
    return float(jnp.sum(mixed**2, axis=(1, 2)).mean() / jnp.sum(x**2))


@pytest.mark.parametrize(
    ("build", "contraction"),
    [
        (lambda: topologies.random_matchings(100), 0.494949),
        (lambda: topologies.epidemic(100, 5), 0.15825),
        (lambda: topologies.epidemic(100, 10, local=True), 0.08990),
    ],
)
def test_rounds_contract_as_known(build, contraction):
    topology = build()
    assert topology.drawn
    assert contraction_by_permutations(topology) == pytest.approx(contraction, rel=0.03)
    assert contraction_by_rounds(topology) == pytest.approx(contraction, rel=0.03)


def matrices_of_rounds(topology, rounds):
    return np.asarray(of_rounds(topology, rounds, jnp.eye(topology.num_nodes)))


@pytest.mark.parametrize("n", [1, 2, 7, 10])
def test_every_round_has_another_matching(n):
    topology, seen = topologies.random_matchings(n), set()
    for w in matrices_of_rounds(topology, 10):
        np.testing.assert_array_equal(w, w.T)
        assert sorted(np.count_nonzero(w, axis=1)) == [1] * (n % 2) + [2] * (n - n % 2)  # one is idle if n is odd
        np.testing.assert_array_equal(w.sum(axis=1), 1)
        seen.add(w.tobytes())
    assert len(seen) > 5 or n <= 2


def test_all_matchings_are_equally_likely():
    topology = topologies.random_matchings(4)
    partners = np.argmax(matrices_of_rounds(topology, 3000)[:, 0, 1:], axis=1)
    assert np.bincount(partners) == pytest.approx(1000, abs=100)


def test_seeds_place_nodes():
    builders = [
        lambda seed: topologies.exponential(20, seed=seed),
        lambda seed: topologies.one_peer_exponential(20, seed=seed),
        lambda seed: topologies.torus(4, 5, seed=seed),
        lambda seed: topologies.hypercube(16, seed=seed),
        lambda seed: topologies.base_graph(20, 1, seed=seed),
        lambda seed: topologies.random_matchings(20, seed=seed),
        lambda seed: topologies.epidemic(20, 3, seed=seed),
        lambda seed: topologies.epidemic(20, 3, local=True, seed=seed),
        lambda seed: topologies.stl_fw(np.eye(4)[np.arange(20) % 4], 3, seed=seed),
    ]
    for build in builders:
        one, again, other = (dense(build(seed)) for seed in (1, 1, 2))
        assert np.array_equal(one, again)
        assert not np.array_equal(one, other)


# STL-FW

BALANCED = np.eye(10)[np.arange(100) % 10]  # ten nodes of each of ten classes


def objective(w, p):
    """The two terms of g: the label bias and the variance."""
    n = len(p)
    return np.sum((w @ p - p.mean(axis=0)) ** 2) / n, np.sum((w - 1 / n) ** 2) / n


@pytest.mark.parametrize("steps", range(1, 10))
@pytest.mark.parametrize("variance", [0.01, 0.1, 1.0])
def test_stl_fw_follows_its_closed_form(steps, variance):
    w = stl_fw.frank_wolfe(BALANCED, steps, variance, np.random.default_rng(steps))
    bias, spread = objective(w, BALANCED)
    np.testing.assert_allclose(np.diag(w), 1 / (steps + 1))  # from step sizes 1 / (l + 1)
    assert bias + variance * spread == pytest.approx((1 + variance) / (steps + 1) - 1 / 10 - variance / 100, abs=1e-6)
    assert bias == pytest.approx(1 / (steps + 1) - 1 / 10, abs=1e-12)  # 0 after as many steps as there are others
    assert largest_degree(w) == steps


def test_stl_fw_breaks_ties(monkeypatch):
    for seed in range(3):
        assert distance_from_mean(dense(topologies.stl_fw(BALANCED, 9, seed=seed))[0]) == pytest.approx(0.575, abs=0.02)
    monkeypatch.setattr(stl_fw, "_NOISE", 0.0)
    assert distance_from_mean(dense(topologies.stl_fw(BALANCED, 9))[0]) == pytest.approx(0.975, abs=0.005)


@pytest.mark.parametrize(
    ("degree", "bias", "spread", "norm"),
    [(5, 0.0068, 0.161, 0.731), (9, 0.0018, 0.103, 0.603), (10, 0.0012, 0.094, 0.576)],
)
def test_stl_fw_on_mnist(mnist, degree, bias, spread, norm):
    for seed in (0, 3):  # whose shards give an initial bias close to that of the known numbers
        p = partitions.shards(mnist, 100, seed=seed).label_distribution
        assert objective(np.eye(100), p)[0] == pytest.approx(0.4406, abs=0.003)
        topology = topologies.stl_fw(p, degree, seed=seed)
        (w,) = dense(topology)
        found_bias, found_spread = objective(w, p)
        assert found_bias == pytest.approx(bias, rel=0.15)
        assert found_spread == pytest.approx(spread, rel=0.03)
        assert distance_from_mean(w) == pytest.approx(norm, rel=0.03)
        assert largest_degree(w) <= degree


def test_stl_fw_on_mnist_against_others(mnist):
    """Neighbourhoods of a ring, random and D-Cliques graphs have more label bias than those of STL-FW."""
    p = partitions.shards(mnist, 100, seed=0).label_distribution
    expected = {
        "ring": (topologies.ring(100), 0.12, 0.15, 0.323),
        "random": (topologies.random_regular(100, 10), 0.030, 0.040, 0.081),
        "random cliques": (topologies.d_cliques(p, max_steps=0), 0.025, 0.041, 0.0826),
        "D-Cliques": (topologies.d_cliques(p), 0.0040, 0.0055, 0.0826),
    }
    for topology, least, most, spread in expected.values():
        bias, found = objective(topology.weights().to_dense(), p)
        assert least <= bias <= most
        assert found == pytest.approx(spread, abs=1e-3)
    assert objective(dense(topologies.stl_fw(p, 10))[0], p)[0] < 0.002


# Invariants


@settings(max_examples=30)
@given(st.integers(2, 24), st.integers(1, 5), st.integers(0, 1000))
def test_matrices_keep_what_is_promised(n, degree, seed):
    labels = np.random.default_rng(seed).dirichlet(np.ones(4), size=n)
    symmetric = [topologies.base_graph(n, degree, seed=seed), topologies.random_matchings(n, seed=seed)]
    directed = [topologies.exponential(n, seed=seed), topologies.one_peer_exponential(n, seed=seed)]
    if n > degree:
        rows = dense(topologies.epidemic(n, degree, local=True, seed=seed))[0]
        np.testing.assert_allclose(rows.sum(axis=1), 1, atol=1e-12)
        assert (np.count_nonzero(rows - np.diag(np.diag(rows)), axis=0) == degree).all()
    for topology in symmetric:
        for matrix in dense(topology):
            np.testing.assert_allclose(matrix, matrix.T, atol=1e-15)
            assert largest_degree(matrix) <= degree
    learnt = stl_fw.frank_wolfe(labels, degree, 0.1, np.random.default_rng(seed))
    assert largest_degree(learnt) <= degree
    for matrix in (*(matrix for topology in symmetric + directed for matrix in dense(topology)), learnt):
        np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-12)
        np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-12)
        assert matrix.min() >= 0


# Wirings of one's own


def two_rings(members, rng):
    pairs = [(a, b) for step in (1, 2) for a, b in zip(members, members[step:] + members[:step], strict=True)]
    return np.array([(rng.choice(a), rng.choice(b)) for a, b in pairs])


def test_a_wiring_may_be_a_function():
    p = np.full((40, 4), 0.25)
    topology = topologies.d_cliques(p, clique_size=5, inter=two_rings, max_steps=0, seed=3)
    assert topology.name == "D-Cliques (two rings)"
    ids = topology.clique_ids[topology.edges]
    between = ids[ids[:, 0] != ids[:, 1]]
    apart = np.abs(np.diff(between, axis=1)).ravel()
    assert sorted(np.minimum(apart, 8 - apart)) == [1] * 8 + [2] * 8
    again = topologies.d_cliques(p, clique_size=5, inter=two_rings, max_steps=0, seed=3)
    np.testing.assert_array_equal(topology.edges, again.edges)


# The page


def test_every_recipe_of_the_page_makes_a_topology():
    section = PAGE.split("## Recipes from networkx")[1]
    recipes = re.findall(r"^\|[^|]+\| `(topologies\..*)` \|$", section, re.MULTILINE)
    assert len(recipes) == 7
    for recipe in recipes:
        topology = eval(recipe, {"topologies": topologies, "nx": nx})
        assert isinstance(topology, topologies.Topology)
        assert topology.num_nodes in (32, 100)


def test_the_page_lists_every_builder():
    overview = PAGE.split("## All topologies")[1].split("\n## ")[0]
    for name in topologies.__all__:
        assert f"`{name}(" in overview or not name.islower()


# Errors


LABELS = np.eye(2)[np.arange(8) % 2]


def inside_a_clique(members, rng):
    return [members[0][:2]]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: topologies.exponential(0), "num_nodes=0"),
        (lambda: topologies.one_peer_exponential(2.5), "num_nodes=2.5"),
        (lambda: topologies.torus(2, 5), "rows=2 must be an integer of at least 3.*use topologies.grid"),
        (lambda: topologies.torus(5, 2), "columns=2 must be an integer of at least 3.*use topologies.grid"),
        (lambda: topologies.hypercube(20), "num_nodes=20 must be a power of two, such as 16 or 32"),
        (lambda: topologies.hypercube(0), "num_nodes=0"),
        (lambda: topologies.base_graph(0, 1), "num_nodes=0"),
        (lambda: topologies.base_graph(10, 0), "degree=0 must be an integer of at least 1"),
        (lambda: topologies.random_matchings(0), "num_nodes=0"),
        (lambda: topologies.epidemic(1, 1), "num_nodes=1 must be an integer of at least 2"),
        (lambda: topologies.epidemic(10, 10), r"degree=10 must be an integer in 1\.\.9"),
        (lambda: topologies.epidemic(5, 3), "no graph has 5 nodes of degree 3"),
        (lambda: topologies.epidemic(10, 3, seed=-1), "seed=-1"),
        (lambda: topologies.stl_fw([1.0], 1), "label_distribution"),
        (lambda: topologies.stl_fw(LABELS, 0), "degree=0"),
        (lambda: topologies.stl_fw(LABELS, 2, variance=0), "variance=0: the matrix would not mix"),
        (lambda: topologies.stl_fw(LABELS, 2, variance=np.nan), "variance=nan must be a number of at least 0"),
        (lambda: topologies.stl_fw(LABELS, 2, variance="0.1"), "variance='0.1' must be a number of at least 0"),
        (lambda: topologies.stl_fw(BALANCED, 1), "degree=1 leaves.*100 nodes disconnected.*choose a higher degree"),
        (lambda: topologies.d_cliques(LABELS, clique_size=4, inter=3), "inter=3 is unknown"),
        (
            lambda: topologies.d_cliques(LABELS, clique_size=4, inter=inside_a_clique),
            "inter=inside_a_clique returns the edge .* inside clique 0: return pairs of nodes of different cliques",
        ),
        (lambda: topologies.d_cliques(LABELS, clique_size=4, inter=lambda m, rng: [[0, 99]]), "leaves the nodes"),
        (lambda: topologies.d_cliques(LABELS, clique_size=4, inter=lambda m, rng: None), "pairs of integers"),
        (lambda: topologies.d_cliques(LABELS, clique_size=4, inter=lambda m, rng: []), "disconnected"),
    ],
)
def test_impossible_networks_are_refused(build, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        build()
