import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from dcliques_jax import algorithms, mixing, topologies
from dcliques_jax._mixing import growth, spectrum


@st.composite
def connected_graphs(draw):
    n = draw(st.integers(1, 90))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    tree = [(int(rng.integers(i)), i) for i in range(1, n)]
    more = rng.integers(n, size=(draw(st.integers(0, 4 * n)), 2))
    return topologies.from_edges(n, np.array([*tree, *more[more[:, 0] != more[:, 1]]], int).reshape(-1, 2))


@given(connected_graphs())
def test_metropolis_hastings_equals_the_reference_and_is_doubly_stochastic(topology):
    weights = mixing.metropolis_hastings(topology).to_dense()
    np.testing.assert_allclose(weights, reference.metropolis_hastings(topology.num_nodes, topology.edges), atol=1e-12)
    np.testing.assert_allclose(weights, weights.T, atol=1e-12)
    np.testing.assert_allclose(weights.sum(axis=0), 1, atol=1e-12)
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-12)
    assert (weights >= 0).all()


def two_cliques():
    inside = [(i, j) for start in (0, 10) for i in range(start, start + 10) for j in range(i + 1, start + 10)]
    return topologies.from_edges(20, [*inside, (9, 10)])


def test_the_paper_s_example_of_two_cliques():
    """Figure 4: inner node A weighs itself 12/110, the gateway 10/110, others 11/110; the gateway weighs all 1/11."""
    weights = mixing.metropolis_hastings(two_cliques()).to_dense()
    np.testing.assert_allclose(weights[0, :10] * 110, [12, *[11] * 8, 10])
    np.testing.assert_allclose(weights[10, 9:20] * 11, 1)
    assert weights[0, 10:].max() == 0


FORMS = {
    "Neighbours": mixing.metropolis_hastings(topologies.ring(12)),
    "GroupMean": mixing.metropolis_hastings(topologies.fully_connected(12)),
    "GroupMean of uneven size": mixing.clique_average(
        topologies.d_cliques(np.eye(3)[np.arange(12) % 3], clique_size=5, max_steps=0)
    ),
    "Dense": mixing.metropolis_hastings(topologies.from_networkx(nx.star_graph(80))),
    "Identity": mixing.Identity(12),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_follow_nodes_that_are_stored_in_another_order(form):
    weights = FORMS[form]
    order = np.random.default_rng(0).permutation(weights.num_nodes)
    moved = weights.reordered(order)
    assert type(moved) is type(weights)
    np.testing.assert_array_equal(moved.to_dense(), weights.to_dense()[np.ix_(order, order)])
    x = jnp.asarray(np.random.default_rng(1).standard_normal((weights.num_nodes, 3)), jnp.float32)
    np.testing.assert_allclose(moved.apply(x[order]), weights.apply(x)[order], atol=1e-6)
    np.testing.assert_array_equal(moved.reordered(np.argsort(order)).to_dense(), weights.to_dense())


def test_the_forms_are_what_they_are_called():
    for name, weights in FORMS.items():
        assert type(weights).__name__ == name.split()[0]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.usefixtures("x64")
def test_every_form_multiplies_as_its_matrix(name):
    weights = FORMS[name]
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(weights.num_nodes, 4, 3)), "b": rng.normal(size=weights.num_nodes)}
    found = jax.jit(mixing.mix)(weights, tree)
    expected = reference.mix(weights.to_dense(), tree)
    for key in tree:
        np.testing.assert_allclose(found[key], expected[key], atol=1e-12)


@pytest.mark.parametrize("name", FORMS)
def test_programs_are_compiled_for_shapes_not_values(name):
    traces = []

    @jax.jit
    def mixed(weights, x):
        traces.append(1)
        return mixing.mix(weights, x)

    weights = FORMS[name]
    x = jnp.ones((weights.num_nodes, 2))
    mixed(weights, x)
    mixed(jax.tree.map(lambda leaf: leaf * 1, weights), x)
    assert len(traces) == 1


@settings(max_examples=20)  # each graph has shapes of its own to compile for
@given(connected_graphs(), st.integers(0, 100))
def test_gossip_preserves_the_mean(topology, seed):
    weights = mixing.metropolis_hastings(topology)
    x = np.random.default_rng(seed).normal(size=(topology.num_nodes, 3)).astype(np.float32)
    mixed = mixing.mix(weights, jnp.asarray(x))
    np.testing.assert_allclose(np.mean(mixed, axis=0), x.mean(axis=0), atol=1e-5)


def test_gossip_keeps_equal_models_equal_to_the_last_bit():
    weights = mixing.metropolis_hastings(topologies.random_regular(50, 6))
    x = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (1, 100)), (50, 100))
    mixed = x
    for _ in range(100):
        mixed = mixing.mix(weights, mixed)
    np.testing.assert_array_equal(mixed, x)


@pytest.mark.parametrize("name", ["Neighbours", "Dense", "GroupMean"])
def test_the_mean_hardly_drifts_over_many_mixings(name):
    weights = FORMS[name]
    x = jax.random.normal(jax.random.key(0), (weights.num_nodes, 50)) + 1
    mixed = jax.lax.fori_loop(0, 2000, lambda _, y: mixing.mix(weights, y), x)
    np.testing.assert_allclose(mixed.mean(axis=0), x.mean(axis=0), atol=2e-6)


def test_gossip_converges_at_the_rate_of_the_second_eigenvalue():
    weights = mixing.metropolis_hastings(topologies.grid(5, 5))
    dense = weights.to_dense()
    vectors = np.linalg.eigh(dense)[1]
    slowest = max((v for v in vectors.T if abs(v.sum()) < 1e-8), key=lambda v: abs(v @ dense @ v))
    shrunk = np.linalg.norm(dense @ slowest)
    assert shrunk == pytest.approx(mixing.second_eigenvalue(weights))


def test_lanczos_agrees_with_all_eigenvalues(monkeypatch):
    for topology in (topologies.grid(12, 12), topologies.random_regular(300, 4), topologies.ring(300)):
        weights = mixing.metropolis_hastings(topology)
        exact = mixing.second_eigenvalue(weights)
        with monkeypatch.context() as patch:
            patch.setattr("dcliques_jax._mixing.spectrum._DENSE_SPECTRUM", 10)
            assert mixing.second_eigenvalue(weights) == pytest.approx(exact, abs=1e-6)


def test_clique_average_equals_the_reference():
    p = np.eye(5)[np.arange(23) % 5]
    topology = topologies.d_cliques(p, clique_size=5, max_steps=0)
    np.testing.assert_allclose(
        mixing.clique_average(topology).to_dense(), reference.clique_average(topology.clique_ids), atol=1e-12
    )


def test_one_clique_is_full_averaging():
    topology = topologies.d_cliques(np.full((7, 2), 0.5), clique_size=7)
    np.testing.assert_allclose(mixing.clique_average(topology).to_dense(), 1 / 7)
    np.testing.assert_allclose(mixing.metropolis_hastings(topology).to_dense(), 1 / 7)


@pytest.mark.parametrize("form", [np.asarray, scipy.sparse.csr_array, lambda w: w.astype(np.float32)])
def test_from_matrix_takes_any_matrix(form):
    matrix = mixing.metropolis_hastings(two_cliques()).to_dense()
    weights = mixing.from_matrix(form(matrix))
    np.testing.assert_allclose(weights.to_dense(), matrix, atol=1e-7)
    np.testing.assert_allclose(weights.to_dense().sum(axis=1), 1, atol=1e-12)  # the residue went to the diagonal
    mixing.check_gossip(weights, two_cliques())


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.ones((2, 3)), r"square, not float64 of shape \(2, 3\)"),
        (np.array([[0.5, 0.6], [0.5, 0.5]]), r"row 0 of the weights sums to 1\.1"),
        (np.array([[np.nan, 1], [0, 1]]), "NaN"),
        (np.eye(2) * 1j, "real and square, not complex128"),
        (None, "real and square, not object"),
        (np.zeros((0, 0)), "real and square"),
    ],
)
def test_matrices_without_unit_rows_are_refused(matrix, message):
    with pytest.raises(ValueError, match=message):
        mixing.from_matrix(matrix)


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (
            np.array([[0.5, 0.5, 0], [0.3, 0.4, 0.3], [0, 0.5, 0.5]]),
            r"asymmetric: W\[0, 1\] = 0\.5 but W\[1, 0\] = 0\.3",
        ),
        (np.array([[1.5, -0.5, 0], [-0.5, 1, 0.5], [0, 0.5, 0.5]]), "must not be negative, but the smallest is -0.5"),
        (np.full((3, 3), 1 / 3), "weights link nodes 0 and 2, but .*has no edge between them"),
        (np.eye(2), "weights are for 2 nodes, the topology has 3"),
    ],
)
def test_matrices_that_are_no_gossip_are_refused(matrix, message):
    with pytest.raises(ValueError, match=message):
        mixing.check_gossip(mixing.from_matrix(matrix), topologies.from_edges(3, [[0, 1], [1, 2]]))


def test_only_doubly_stochastic_forms_are_gossip():
    with pytest.raises(ValueError, match="row 0 of the weights sums to 2"):
        mixing.check_gossip(mixing.Dense(2 * np.eye(3)), topologies.ring(3))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("leaf", [jnp.ones((1, 2)), jnp.ones((13, 2)), jnp.ones(()), jnp.ones((81, 2), int)])
def test_mix_takes_one_row_a_node(name, leaf):
    with pytest.raises(ValueError, match="mix takes floating-point arrays with the"):
        mixing.mix(FORMS[name], {"a": leaf})


@pytest.mark.parametrize(
    ("edges", "message"), [([[0, 3]], "leaves the nodes"), ([[1, 1]], "itself"), ([[0.5, 1]], "pairs of integers")]
)
def test_neighbourhoods_are_checked(edges, message):
    with pytest.raises(ValueError, match=message):
        mixing.neighbourhood_average(3, edges)


def test_an_edge_listed_twice_counts_once():
    one, twice = mixing.neighbourhood_average(3, [[0, 1]]), mixing.neighbourhood_average(3, [[0, 1], [1, 0]])
    np.testing.assert_array_equal(one.to_dense(), twice.to_dense())


def test_eigenvalues_need_symmetry():
    with pytest.raises(ValueError, match="not symmetric"):
        mixing.spectral_gap(mixing.neighbourhood_average(3, [[0, 1], [1, 2]]))


def test_clique_average_needs_cliques():
    with pytest.raises(ValueError, match="neither cliques nor gradient edges"):
        mixing.clique_average(topologies.ring(5))


@pytest.mark.parametrize("form", [mixing.Neighbours, mixing.Dense])
@pytest.mark.parametrize("name", FORMS)
def test_any_form_can_be_forced(name, form):
    matrix = FORMS[name].to_sparse()
    forced = form.from_sparse(matrix)
    assert isinstance(forced, form)
    np.testing.assert_allclose(forced.to_dense(), matrix.toarray(), atol=1e-12)
    x = np.random.default_rng(0).normal(size=(forced.num_nodes, 3)).astype(np.float32)
    np.testing.assert_allclose(mixing.mix(forced, x), matrix @ x, atol=1e-5)


NEIGHBOURS = (np.array([[1, 2], [0, 1], [0, 2]]), np.array([[0.25, 0.25], [0.5, 0], [0.5, 0]]))
GROUPS = (np.array([[0, 2], [1, 1]]), np.array([[0.5, 0.5], [1, 0]]), np.array([0, 1, 0]))


def test_forms_made_by_hand_multiply_as_their_matrix():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2)), jnp.float32)
    for weights in (mixing.Neighbours(*NEIGHBOURS), mixing.GroupMean(*GROUPS), mixing.Dense(np.eye(3)[[1, 2, 0]])):
        np.testing.assert_allclose(mixing.mix(weights, x), weights.to_dense() @ x, atol=1e-6)


def changed(arrays, position, value):
    return [value if k == position else array for k, array in enumerate(arrays)]


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray, np.ndarray.tolist])
@pytest.mark.parametrize(
    ("form", "arrays", "message"),
    [
        (mixing.Dense, [np.array([[0.5, 0.6], [0.5, 0.5]])], r"row 0 of the weights sums to 1\.1"),
        (mixing.Dense, [np.zeros((2, 2))], "row 0 of the weights sums to 0"),
        (mixing.Dense, [np.array([[np.nan, 1], [0, 1]])], "NaN or infinite"),
        (mixing.Dense, [np.array([[np.inf, -np.inf], [0, 1]])], "NaN or infinite"),
        (mixing.Dense, [np.ones((2, 3)) / 3], r"square, not float.. of shape \(2, 3\)"),
        (mixing.Dense, [np.ones((2, 1, 1))], "square"),
        (mixing.Neighbours, changed(NEIGHBOURS, 0, np.array([[1, 3], [0, 1], [0, 2]])), "neighbours hold 3.*0..2"),
        (mixing.Neighbours, changed(NEIGHBOURS, 0, np.array([[1, -1], [0, 1], [0, 2]])), "neighbours hold -1"),
        (mixing.Neighbours, changed(NEIGHBOURS, 0, NEIGHBOURS[0] + 0.5), "neighbours must be integers.*float"),
        (mixing.Neighbours, changed(NEIGHBOURS, 1, NEIGHBOURS[1] * np.nan), "values hold NaN"),
        (mixing.Neighbours, changed(NEIGHBOURS, 1, np.ones((3, 1))), r"values of shape \(3, 1\) must both be"),
        (
            mixing.GroupMean,
            changed(GROUPS, 0, np.array([[0, 3], [1, 1]])),
            "members hold 3, which leaves the nodes 0..2",
        ),
        (mixing.GroupMean, changed(GROUPS, 0, np.array([[0, 0], [1, 1]])), "node 0 has a share 2 times"),
        (
            mixing.GroupMean,
            changed(GROUPS, 0, np.array([[0, 1], [2, 2]])),
            r"node 1 has a share of group 0, but group\[1\]=1",
        ),
        (mixing.GroupMean, changed(GROUPS, 1, np.array([[0.5, 0.25], [1, 0]])), r"shares\[0, 1\]=0\.25.*1/2"),
        (mixing.GroupMean, changed(GROUPS, 1, np.array([[0.5, 0.5], [0.0, 0]])), "node 1 has a share 0 times"),
        (mixing.GroupMean, changed(GROUPS, 1, np.array([[0.5, np.inf], [1, 0]])), "shares hold NaN or infinite"),
        (mixing.GroupMean, changed(GROUPS, 2, np.array([0, 2, 0])), "group hold 2, which leaves the groups 0..1"),
        (mixing.GroupMean, changed(GROUPS, 2, np.array([0, 1])), "members hold 2, which leaves the nodes 0..1"),
        (mixing.GroupMean, changed(GROUPS, 2, np.array([[0, 1, 0]])), "group must be integers in 1 dimensions"),
    ],
)
def test_wrong_forms_are_refused(form, arrays, message, convert):
    with pytest.raises(ValueError, match=message):
        form(*map(convert, arrays))


@pytest.mark.parametrize("name", FORMS)
def test_weights_cannot_be_changed(name):
    for leaf in jax.tree.leaves(FORMS[name]):
        with pytest.raises(ValueError, match="read-only"):
            leaf += 1


@pytest.mark.parametrize(
    ("form", "arrays"), [(mixing.Neighbours, NEIGHBOURS), (mixing.GroupMean, GROUPS), (mixing.Dense, [np.eye(3)])]
)
def test_weights_do_not_follow_the_arrays_they_were_made_of(form, arrays):
    given = [array.copy() for array in arrays]
    weights = form(*given)
    before = weights.to_dense()
    for array in given:
        array += 1
    np.testing.assert_array_equal(weights.to_dense(), before)
    on_device = form(*map(jnp.asarray, arrays))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(on_device))


@pytest.mark.parametrize("name", FORMS)
def test_weights_hold_whatever_jax_puts_into_them(name):
    """Shapes, objects and stacks of runs: only what a user passes to a constructor is checked."""
    weights = FORMS[name]
    leaves, structure = jax.tree.flatten(weights)
    for other in (lambda leaf: object(), np.size, lambda leaf: np.zeros(0), lambda leaf: np.stack([leaf, leaf])):
        put_in = [other(leaf) for leaf in leaves]
        assert all(a is b for a, b in zip(jax.tree.leaves(jax.tree.unflatten(structure, put_in)), put_in, strict=True))
    stacked = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), weights)
    x = jnp.ones((2, weights.num_nodes, 3))
    np.testing.assert_allclose(jax.vmap(mixing.mix)(stacked, x), x, atol=1e-6)


def test_forms_are_made_inside_programs():
    @jax.jit
    def mixed(matrix, neighbours, values, x):
        return mixing.mix(mixing.Dense(matrix), x), mixing.mix(mixing.Neighbours(neighbours, values), x)

    x, matrix = jnp.eye(3), np.eye(3, dtype=np.float32)[[1, 2, 0]]
    dense, sparse = mixed(matrix, NEIGHBOURS[0], NEIGHBOURS[1].astype(np.float32), x)
    np.testing.assert_allclose(dense, matrix, atol=1e-6)
    np.testing.assert_allclose(sparse, mixing.Neighbours(*NEIGHBOURS).to_dense(), atol=1e-6)


@pytest.mark.parametrize("name", ["Neighbours", "Dense"])
def test_empty_places_are_read_by_nobody(name):
    weights = FORMS[name]
    order = np.append(np.random.default_rng(0).permutation(weights.num_nodes), [-1, -1])
    moved = weights.reordered(order).to_dense()
    np.testing.assert_array_equal(moved[:-2, :-2], weights.to_dense()[np.ix_(order[:-2], order[:-2])])
    np.testing.assert_array_equal(moved[-2:], np.eye(len(order))[-2:])
    np.testing.assert_array_equal(moved[:-2, -2:], 0)


# How fast matrices mix


def circulant(n, offsets):
    return sum((np.roll(np.eye(n), offset, axis=1) for offset in offsets), start=np.eye(n)) / (len(offsets) + 1)


@pytest.mark.parametrize(("n", "norm", "period"), [(16, 0.6, 0), (100, 0.75, 0.1916), (1000, 0.81818, 0.0234)])
def test_contraction_of_exponential_graphs(n, norm, period):
    """All peers at once have the norm 1 - 2 / (tau + 1). One peer at a time is exact for powers of 2."""
    offsets = [2**m for m in range(int(np.ceil(np.log2(n))))]
    at_once = mixing.from_matrix(circulant(n, offsets))
    assert mixing.contraction(at_once) == pytest.approx(norm**2, abs=1e-5)
    in_turn = mixing.Sequence.of([mixing.from_matrix(circulant(n, [offset])) for offset in offsets])
    assert mixing.contraction(in_turn) ** (len(offsets) / 2) == pytest.approx(period, abs=1e-4)


def test_contraction_is_the_largest_singular_value_and_not_lambda2():
    swap = np.array([[0.0, 1.0, 0.0], [0.5, 0.0, 0.5], [0.5, 0.0, 0.5]])
    weights = mixing.from_matrix(swap)
    lambda2 = np.sort(np.abs(np.linalg.eigvals(swap)))[-2]
    assert mixing.contraction(weights) == pytest.approx(np.linalg.norm(swap - 1 / 3, 2) ** 2)
    assert mixing.contraction(weights) > lambda2**2 + 0.1


@pytest.mark.parametrize(("n", "found"), [(100, 0.494949), (1000, 0.49950)])
def test_contraction_of_random_matchings(n, found):
    weights = topologies.from_matrices(np.kron(np.eye(n // 2), np.full((2, 2), 0.5)), drawn=True).weights()
    assert mixing.contraction(weights) == pytest.approx(found, abs=1e-5)


@pytest.mark.parametrize(
    ("graph", "second", "smallest"),
    [
        (nx.hypercube_graph(4), 0.6, -0.6),
        (nx.hypercube_graph(6), 0.71429, -0.71429),
        (nx.grid_graph((4, 4), periodic=True), 0.6, -0.6),
        (nx.grid_graph((10, 10), periodic=True), 0.92361, -0.6),
        (nx.star_graph(99), 0.99, 0),
        (nx.complete_graph(5), 0, 0),
    ],
)
def test_known_eigenvalues(graph, second, smallest):
    weights = topologies.from_networkx(graph).weights()
    assert mixing.second_eigenvalue(weights) == pytest.approx(second, abs=1e-5)
    assert mixing.smallest_eigenvalue(weights) == pytest.approx(smallest, abs=1e-5)
    assert mixing.contraction(weights) == pytest.approx(second**2, abs=1e-5)


def test_what_never_mixes_and_what_mixes_at_once():
    assert mixing.contraction(mixing.Identity(5)) == 1
    assert mixing.contraction(mixing.Identity(1)) == 0
    assert mixing.contraction(mixing.metropolis_hastings(topologies.fully_connected(5))) == 0
    two = topologies.from_edges(4, [(0, 1), (2, 3), (1, 2)], clique_ids=[0, 0, 1, 1])
    assert mixing.contraction(mixing.clique_average(two)) == 1
    assert mixing.contraction(mixing.from_matrix(np.full((4, 4), 0.25))) == 0


def test_large_matrices_mix_as_the_dense_computation_says(monkeypatch):
    n = 128
    rows = mixing.neighbourhood_average(n, topologies.grid(8, 16).edges)
    one_peer = [mixing.from_matrix(circulant(n, [2**m])) for m in range(7)]
    found = {
        "symmetric": mixing.metropolis_hastings(topologies.random_regular(n, 6)),
        "slow": mixing.from_matrix(circulant(n, [1])),
        "directed": mixing.from_matrix(circulant(n, [1, 2, 4, 8, 16, 32, 64])),
        "rows": rows,
        "sequence": mixing.Sequence.of(one_peer[:6]),
        "exact": mixing.Sequence.of(one_peer),
    }
    exact = {name: mixing.contraction(weights) for name, weights in found.items()}
    smallest = mixing.smallest_eigenvalue(found["symmetric"])
    monkeypatch.setattr("dcliques_jax._mixing.spectrum._DENSE_SPECTRUM", 10)
    assert {name: mixing.contraction(weights) for name, weights in found.items()} == pytest.approx(exact, rel=1e-3)
    assert mixing.smallest_eigenvalue(found["symmetric"]) == pytest.approx(smallest, abs=1e-3)
    assert exact["exact"] == 0


def test_d2_is_decided_by_a_precise_eigenvalue():
    """The smallest of an even ring is -1/3, on the edge, in a graph too large for all eigenvalues."""
    for n in (2002, 2101):
        weights = topologies.ring(n).weights()
        known = 1 / 3 + 2 / 3 * np.cos(2 * np.pi * (n // 2) / n)
        assert spectrum.extremes(weights, precise=True).smallest == pytest.approx(known, abs=1e-10)
    network = algorithms.d2().network(topologies.ring(2002))
    np.testing.assert_allclose(network.gossip.to_sparse().diagonal(), 1 / 3)  # not (I + W) / 2
    algorithms.d2().traits.check(network)


def test_precise_eigenvalues_agree_with_all_eigenvalues(monkeypatch):
    graphs = [topologies.grid(12, 12), topologies.torus(4, 30), topologies.random_regular(150, 6)]  # the last is wide
    matrices = [mixing.metropolis_hastings(topology) for topology in graphs]
    matrices += [mixing.from_matrix(nx.to_scipy_sparse_array(nx.hypercube_graph(8)) / 8)]  # wide, and -1
    exact = [mixing.smallest_eigenvalue(weights) for weights in matrices]
    monkeypatch.setattr("dcliques_jax._mixing.spectrum._DENSE_SPECTRUM", 10)
    found = [spectrum.extremes(weights, precise=True).smallest for weights in matrices]
    assert found == pytest.approx(exact, abs=1e-10)


def test_what_holds_for_one_matrix_is_not_computed_for_others():
    ring = topologies.ring(8).weights()
    for weights in (mixing.Paced(ring, times=2), topologies.base_graph(8, 1).weights()):
        with pytest.raises(ValueError, match="eigenvalues are those of one matrix"):
            mixing.spectral_gap(weights)
    with pytest.raises(ValueError, match=r"pass weights\.base"):
        mixing.contraction(mixing.Paced(ring, times=2))


def test_a_lazy_matrix_keeps_its_pace():
    ring = topologies.ring(8).weights()
    found = mixing.lazy(mixing.Paced(ring, every=2))
    assert (found.every, found.times) == (2, 1)
    np.testing.assert_array_equal(found.base.to_dense(), mixing.lazy(ring).to_dense())
    with pytest.raises(ValueError, match="make the matrix lazy before"):
        mixing.lazy(mixing.Paced(ring, omegas=np.ones((8, 1)), times=2))


def test_the_growth_of_d2_is_that_of_the_worst_mode():
    """Gossip twice in every third round lets modes below 0.2 grow. The torus has 0.6 and -0.6, and 0.2 in between."""
    weights = mixing.Paced(topologies.torus(4, 4).weights(), every=3, times=2)
    one_turn = [[0.04, 0.04 * 3], [0.04 - 1, 0.04 * 3 - 2]]  # [[l, l], [l - 1, l]] [[1, 2], [0, 1]]
    expected = np.abs(np.linalg.eigvals(one_turn)).max() ** (1 / 3)
    assert growth.d2_growth(weights) == pytest.approx(expected)
    assert expected > 1.2


def test_the_growth_of_d2_is_computed_once_for_equal_matrices(monkeypatch):
    asked = []
    monkeypatch.setattr(growth, "extremes", lambda *given, **how: asked.append(1) or spectrum.extremes(*given, **how))
    for rate in (0.1, 0.2):
        algorithm = algorithms.d2(optax.sgd(rate))
        algorithm.traits.check(algorithm.network(topologies.ring(29)))
    assert asked == [1]
    algorithm.traits.check(algorithm.network(topologies.ring(31)))
    assert asked == [1, 1]


def test_messages_are_the_readers_of_each_node():
    star = topologies.from_networkx(nx.star_graph(4))
    np.testing.assert_array_equal(mixing.messages(star.weights()).sent, [[4, 1, 1, 1, 1]])
    np.testing.assert_array_equal(mixing.messages(mixing.Identity(3)).sent, [[0, 0, 0]])
    np.testing.assert_array_equal(mixing.messages(topologies.fully_connected(3).weights()).sent, [[2, 2, 2]])
    sends = topologies.from_matrices([[[1, 0], [0.5, 0.5]], [[0, 1], [1, 0]]]).weights()
    np.testing.assert_array_equal(mixing.messages(sends).sent, [[1, 0], [1, 1]])


# Matrices in turn


def test_sequences_take_matrices_of_any_form():
    ids = np.arange(6) // 3
    cliques = [mixing.clique_average(topologies.from_edges(6, EDGES_OF_CLIQUES, clique_ids=i)) for i in (ids,)]
    sequence = mixing.Sequence.of([*cliques, mixing.Identity(6)])
    np.testing.assert_allclose(sequence.matrices()[0].toarray(), cliques[0].to_dense())
    np.testing.assert_allclose(sequence.matrices()[1].toarray(), np.eye(6))
    for wrong in ([], [mixing.Identity(3), mixing.Identity(4)]):
        with pytest.raises(ValueError, match="at least one matrix, and matrices for the same nodes"):
            mixing.Sequence.of(wrong)


EDGES_OF_CLIQUES = [(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5), (2, 3)]


def test_weights_must_follow_the_directions_of_a_graph():
    circle = topologies.from_networkx(nx.cycle_graph(6, create_using=nx.DiGraph))
    mixing.check_gossip(circle.weights(), circle, "columns")
    against = mixing.from_matrix(circle.weights().to_dense().T)
    with pytest.raises(ValueError, match="has no edge between them"):
        mixing.check_gossip(against, circle, "columns")
    with pytest.raises(ValueError, match="drawn in every round between any nodes"):
        mixing.check_gossip(mixing.Drawn(mixing.Sequence.of([circle.weights()])), circle, "columns")


def test_traffic_of_matrices_with_different_periods():
    turns = [mixing.from_matrix(np.roll(np.eye(6), shift, axis=1)) for shift in (1, 2, 3)]
    network = algorithms.Network(mixing.Sequence.of(turns), mixing.Sequence.of([mixing.Identity(6), turns[0]]))
    assert algorithms.sends()(network, {}).messages.sum(axis=1).tolist() == [6, 12, 6, 12, 6, 12]
