import numpy as np
import pytest
import scipy.sparse

import catalogue
import reference
from dcliques_jax import cliques, clocks, faults, mixing, partitions, reports, topologies


@pytest.mark.parametrize("name", catalogue.STATIC)
def test_every_figure_equals_the_reference(name):
    p = catalogue.PARTITIONS["shards"](catalogue.dataset(), catalogue.nodes_of(name)).label_distribution
    topology = catalogue.TOPOLOGIES[name](p)
    report, n = topology.report(p, num_parameters=100), topology.num_nodes
    near = reference.neighbours(n, topology.edges)
    degrees = [len(found) for found in near]
    assert report.edges_per_node == pytest.approx(np.mean(degrees))
    assert (report.min_edges, report.max_edges) == (min(degrees), max(degrees))
    eigenvalues = np.sort(np.abs(np.linalg.eigvalsh(reference.metropolis_hastings(n, topology.edges))))
    assert report.second_eigenvalue == pytest.approx(eigenvalues[-2], abs=1e-9)
    distances = reference.distances(n, topology.edges)
    assert report.diameter == distances.max()
    assert report.mean_distance == pytest.approx(distances.sum() / (n * (n - 1)))
    skews = [reference.skew([i, *near[i]], p) for i in range(n)]
    assert report.neighbourhood_skew == pytest.approx(np.mean(skews))
    assert report.max_neighbourhood_skew == pytest.approx(np.max(skews))
    assert report.bytes == pytest.approx(400 * np.mean(degrees))
    if topology.clique_ids is None:
        assert report.clique_skew is report.num_cliques is None
    else:
        groups = [np.flatnonzero(topology.clique_ids == c) for c in range(report.num_cliques)]
        assert report.clique_skew == pytest.approx(np.mean([reference.skew(group, p) for group in groups]))
    if topology.gradient_edges is None:
        assert report.messages_averaging is report.bytes_averaging is None
    else:
        gradient_degrees = [len(found) for found in reference.neighbours(n, topology.gradient_edges)]
        assert report.messages_averaging == pytest.approx(np.mean(degrees) + np.mean(gradient_degrees))
        assert report.messages_averaging_paper == pytest.approx(2 * np.mean(degrees))
        assert report.bytes_averaging == pytest.approx(400 * report.messages_averaging)


def test_messages_as_the_paper_counts_them_and_tight():
    for n, paper, tight in [(1000, 37.8, 27.9), (100, 19.8, 18.9)]:
        report = topologies.d_cliques(np.full((n, 10), 0.1), max_steps=0).report()
        assert report.messages_averaging_paper == pytest.approx(paper)
        assert report.messages_averaging == pytest.approx(tight)
    assert topologies.fully_connected(100).report().messages == 99


def test_a_good_gap_can_hide_a_bad_neighbourhood(mnist):
    """The random graph has a far larger spectral gap than D-Cliques, and more skewed neighbourhoods."""
    p = partitions.shards(mnist, 100, seed=1).label_distribution
    random, dc = topologies.random_regular(100, 10).report(p), topologies.d_cliques(p).report(p)
    assert random.spectral_gap > 4 * dc.spectral_gap
    assert random.neighbourhood_skew > 2 * dc.neighbourhood_skew
    assert dc.clique_skew < 0.1


def test_distances_of_large_graphs_are_sampled_and_said_to_be(monkeypatch):
    exact = topologies.grid(8, 8).report()
    monkeypatch.setattr("dcliques_jax._reports.measures._MOST_DISTANCES", 40 * 64)
    sampled = topologies.grid(8, 8).report()
    assert sampled.distance_sources == 40
    assert f"(diameter at least {sampled.diameter}, measured from 40 random nodes)" in str(sampled)
    assert sampled.diameter <= exact.diameter
    assert "(diameter 14)" in str(exact)
    assert sampled.mean_distance == pytest.approx(exact.mean_distance, rel=0.1)


def test_the_gap_of_a_long_ring_is_exact():
    report = topologies.ring(4000).report()
    assert report.spectral_gap == pytest.approx(2 / 3 * (1 - np.cos(2 * np.pi / 4000)), rel=1e-6)
    assert report.diameter == 2000


def test_gaps_of_large_graphs_are_precise_however_small(monkeypatch):
    """Narrow and wide graphs, with few slow modes and with many, and matrices whose last eigenvalue is close to -1."""
    p = np.full((300, 10), 0.1)
    halves = [topologies.random_regular(150, 6, seed=seed).edges + 150 * seed for seed in range(2)]
    graphs = [topologies.d_cliques(p, inter=inter) for inter in ("ring", "fractal", "small_world", "fully_connected")]
    graphs += [topologies.grid(15, 20), topologies.from_edges(300, [*halves[0], *halves[1], [0, 150]])]
    matrices = [mixing.metropolis_hastings(graph) for graph in graphs]
    matrices += [mixing.from_matrix(topologies.ring(n).adjacency() / 2) for n in (300, 301)]
    matrices += [mixing.from_matrix(scipy.sparse.block_diag([matrix.to_sparse() for matrix in matrices[:2]]))]
    matrices += [mixing.from_matrix(topologies.random_regular(300, 6).adjacency() / 6)]
    exact = [mixing.spectral_gap(matrix) for matrix in matrices]
    monkeypatch.setattr("dcliques_jax._mixing.spectrum._DENSE_SPECTRUM", 10)
    assert [mixing.spectral_gap(matrix) for matrix in matrices] == pytest.approx(exact, rel=1e-3, abs=1e-9)


def test_it_prints_well():
    p = np.eye(10)[np.arange(100) % 10]
    topology = topologies.d_cliques(p, cliques=cliques.ideal_cliques(p))
    text = str(topology.report(p, num_parameters=7850))
    assert text.splitlines()[0] == "D-Cliques (fully connected): 100 nodes, 10 cliques, 495 edges"
    assert "  edges per node               9.90 (9 to 10)" in text
    assert "  messages per node and round  9.9" in text
    assert "    with gradient averaging    18.9 (19.8 as the paper counts)" in text
    assert "  bytes per node and round     311 kB" in text
    assert max(map(len, text.splitlines())) < 100
    assert "skew" not in str(topology.report())
    assert "bytes" not in str(topology.report())


def test_averaging_gradients_waits_once_more_and_sends_more():
    p = np.eye(10)[np.arange(100) % 10]
    topology = topologies.d_cliques(p, cliques=cliques.ideal_cliques(p))
    report = topology.report(num_parameters=7850, clock=clocks.WAN)
    size = 8 * 4 * 7850 / 20e6
    assert report.seconds == pytest.approx(0.05 + 10 * size)  # the node with most edges has 9 inside, 1 outside
    assert report.seconds_averaging == pytest.approx(2 * 0.05 + 19 * size)
    assert "  seconds per round            0.176\n    with gradient averaging    0.339" in str(report)
    plain = topologies.ring(8).report(num_parameters=7850, clock=clocks.WAN)
    assert plain.seconds_averaging is None
    assert "averaging" not in str(plain)


def test_html_holds_the_same_and_is_escaped():
    report = topologies.from_edges(2, [[0, 1]], name="<b>").report()
    page = report._repr_html_()
    assert "<b>" not in page
    assert "&lt;b&gt;: 2 nodes, 1 edges" in page
    for _, value in report._rows():
        assert value in page


def test_the_distribution_must_fit():
    with pytest.raises(ValueError, match="label_distribution has 3 rows, the topology 5 nodes"):
        topologies.ring(5).report(np.eye(3))


def test_what_devices_tell_each_other_is_reported():
    ring = topologies.ring(100)
    report = ring.report(num_parameters=10, num_devices=4)
    assert 4 <= report.cut_edges <= 8
    assert report.bytes_between_devices == 40 * report.rows_between_devices
    assert report.bytes_between_devices_averaging is None
    assert "edges between 4 devices" in str(report)
    everyone = topologies.fully_connected(12).report(num_parameters=10, num_devices=4)
    assert everyone.rows_between_devices == 4  # one sum
    assert ring.report(num_parameters=10, num_devices=1).bytes_between_devices == 0
    assert ring.report().cut_edges is None
    with pytest.raises(ValueError, match="num_devices=0"):
        ring.report(num_devices=0)


def test_the_short_form_is_one_line_and_print_gives_the_table():
    report = topologies.ring(8).report()
    assert repr(report) == "Report('ring', num_nodes=8, edges=8, edges_per_node=2.00, spectral_gap=0.195)"
    assert len(str(report).splitlines()) > 3
    p = np.eye(2)[np.arange(8) % 2]
    assert ", cliques=4, " in repr(topologies.d_cliques(p, clique_size=2).report(p))


# Any gossip matrix


def circulant(n, offsets):
    """Equal weights for oneself and the nodes at these offsets."""
    return sum((np.roll(np.eye(n), offset, axis=1) for offset in offsets), start=np.eye(n)) / (len(offsets) + 1)


@pytest.mark.parametrize("name", catalogue.TOPOLOGIES)
def test_labels_weights_and_messages_equal_the_plain_sums(name):
    p = catalogue.PARTITIONS["shards"](catalogue.dataset(), catalogue.nodes_of(name)).label_distribution
    topology = catalogue.TOPOLOGIES[name](p)
    report, n = topology.report(p), topology.num_nodes
    matrices = [matrix.toarray() for matrix in topology.weights().matrices()]
    assert report.num_rounds == len(matrices)
    sent = np.array([[(matrix[:, j] != 0).sum() - (matrix[j, j] != 0) for j in range(n)] for matrix in matrices])
    assert report.messages == pytest.approx(sent.mean())
    assert report.max_messages == sent.max()
    variance = np.mean([((matrix - 1 / n) ** 2).sum() / n for matrix in matrices])
    assert report.weight_variance == pytest.approx(variance, abs=1e-12)
    apart = p - p.mean(axis=0)
    if topology.drawn:
        rng = np.random.default_rng(0)
        rounds = [matrix @ rng.permutation(apart) for matrix in matrices for _ in range(4000 // len(matrices))]
        assert report.label_bias == pytest.approx(np.mean([(mixed**2).sum() / n for mixed in rounds]), rel=0.02)
        assert report.contraction * (apart**2).sum() / n == pytest.approx(report.label_bias)
        assert report.mean_distance is report.neighbourhood_skew is None
    else:
        bias = np.mean([((matrix @ p - p.mean(axis=0)) ** 2).sum() / n for matrix in matrices])
        assert report.label_bias == pytest.approx(bias, abs=1e-12)
    assert max(map(len, str(report).splitlines())) < 100


def test_what_a_matrix_is_gets_said():
    lazy = circulant(6, [1])
    rows = mixing.neighbourhood_average(3, [[0, 1], [1, 2]]).to_dense()
    for matrix, told in [
        (lazy @ lazy.T, "symmetric"),
        (lazy, "doubly stochastic, directed"),
        (rows, "rows sum to 1, columns do not"),
    ]:
        report = topologies.from_matrices(matrix).report()
        assert report.matrix == told
        assert f"  gossip matrix                {told}\n" in str(report)
        assert (report.second_eigenvalue is None) == (told != "symmetric")
        assert report.contraction == pytest.approx(np.linalg.norm(matrix - 1 / len(matrix), 2) ** 2)
    assert "|lambda2|" not in str(report)
    assert "contraction=" in repr(report)


def test_directed_graphs_count_arcs_and_distances_along_them():
    report = topologies.from_matrices(circulant(10, [1]), name="one way").report(np.eye(10))
    assert str(report).startswith("one way: 10 nodes, 10 arcs\n  arcs per node                1.00\n")
    assert report.diameter == 9
    assert report.mean_distance == pytest.approx(5)
    assert report.neighbourhood_skew == pytest.approx(2 * 0.8)  # a node and the one it hears from hold 2 of 10 classes
    dead_end = topologies.from_matrices([[1, 0], [0.5, 0.5]]).report()
    assert dead_end.diameter is None
    assert "not every node reaches every other" in str(dead_end)


def test_sequences_say_their_rounds():
    turns = topologies.from_matrices([circulant(8, [offset]) for offset in (1, 2, 4)], name="one peer").report()
    assert str(turns).startswith("one peer: 8 nodes, 24 arcs in 3 rounds\n  arcs per node, all rounds    3.00\n")
    assert (turns.contraction, turns.messages, turns.max_messages) == (0, 1, 1)
    assert "0 (models agree after 3 rounds)" in str(turns)
    uneven = topologies.sequence([topologies.ring(8, seed=1), topologies.fully_connected(8)]).report()
    assert (uneven.messages, uneven.max_messages) == (4.5, 7)
    assert "4.5 (at most 7)" in str(uneven)


def test_a_mean_just_below_the_most_is_not_rounded_up_to_it():
    pairs = scipy.sparse.block_diag([np.full((2, 2), 0.5)] * 50 + [[[1.0]]])
    report = topologies.from_matrices(pairs, drawn=True).report()
    assert "0.99 (at most 1)" in str(report)
    assert ": 101 nodes, drawn in every round" in str(report)


def test_a_hub_sends_more_than_the_mean():
    report = topologies.from_edges(100, [(0, i) for i in range(1, 100)]).report()
    assert (report.messages, report.max_messages) == (pytest.approx(1.98), 99)
    assert report.second_eigenvalue == pytest.approx(0.99)
    assert report.smallest_eigenvalue == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_bias_and_variance_on_real_labels(mnist, seed):
    """2 shards of MNIST. Ranges are those of other partitions, orders and cliques."""
    p = partitions.shards(mnist, 100, seed=seed).label_distribution
    alone = float(((p - p.mean(axis=0)) ** 2).sum()) / 100  # the bias without gossip
    assert 0.43 < alone < 0.49
    rings = [topologies.ring(100, seed=order).report(p) for order in range(10)]
    assert all(0.125 < ring.label_bias < 0.175 for ring in rings)
    # Over random orders, W keeps this share of the bias.
    kept = rings[0].weight_variance * 100 / 99
    assert np.mean([ring.label_bias for ring in rings]) == pytest.approx(kept * alone, rel=0.06)
    assert rings[0].weight_variance == pytest.approx((1 / 3) - 1 / 100)
    assert 0.022 < topologies.d_cliques(p, max_steps=0, seed=seed).report(p).label_bias < 0.05
    swapped = topologies.d_cliques(p, seed=seed).report(p)
    assert 0.0043 < swapped.label_bias < 0.0052
    assert swapped.weight_variance == pytest.approx(0.0826, abs=1e-4)
    assert swapped.contraction == pytest.approx(0.918**2, abs=1e-3)


# Faults


def ring_in_order(n=16):
    return topologies.from_edges(n, [(i, (i + 1) % n) for i in range(n)])


@pytest.mark.parametrize(("p", "mean", "square"), [(0.1, 0.954328, 0.913786), (0.3, 0.964477, 0.937321)])
@pytest.mark.parametrize("fault", [faults.message_loss, lambda p: faults.bursts(p, 5)])
def test_lost_links_slow_mixing_down(fault, p, mean, square):
    expected = ring_in_order().report(faults=fault(p)).expected
    assert expected.arrival == pytest.approx(1 - p)
    assert expected.second_eigenvalue == pytest.approx(mean, abs=1e-6)
    assert expected.contraction == pytest.approx(square, abs=1e-6)
    assert expected.doubly_stochastic


@pytest.mark.parametrize(("share", "mean"), [(0.9, 0.958895), (0.5, 0.987313)])
def test_offline_nodes_slow_mixing_down(share, mean):
    report = ring_in_order().report(faults=faults.stragglers(1 - share))
    assert report.expected.second_eigenvalue == pytest.approx(mean, abs=1e-6)
    assert report.expected.online == pytest.approx(16 * share)
    assert report.expected.contraction is None
    assert f"    nodes online               {16 * share:.1f} on average" in str(report)
    half = ring_in_order().report(faults=[faults.participation(0.5), faults.message_loss(0.1)]).expected
    assert half.arrival == pytest.approx(0.9 * 8 * 7 / (16 * 15))


@pytest.mark.parametrize("directed", [False, True])
@pytest.mark.parametrize("kind", ["symmetric", "directed", "rows", "complete", "drawn"])
def test_the_expected_contraction_is_that_of_many_rounds(kind, directed):
    """Draws lost messages and averages W_t^T W_t."""
    n, p, rng = 8, 0.3, np.random.default_rng(0)
    weights = rng.random((n, n))
    matrix = {
        "symmetric": ring_in_order(n).weights().to_dense(),
        "directed": circulant(n, [1, 3]),
        "rows": weights / weights.sum(axis=1, keepdims=True),
        "complete": np.full((n, n), 1 / n),
        "drawn": np.kron(np.eye(4), np.full((2, 2), 0.5)),
    }[kind]
    topology = topologies.from_matrices(matrix, drawn=kind == "drawn")
    if kind == "complete":
        topology = topologies.fully_connected(n)
    expected = topology.report(faults=faults.message_loss(p, directed=directed)).expected
    squares = np.zeros((n, n))
    for _ in range(rounds := 20_000):
        alive = rng.random((n, n)) >= p
        alive = alive if directed else np.triu(alive, 1) | np.triu(alive, 1).T
        arrived = np.where(alive & ~np.eye(n, dtype=bool), matrix, 0)
        arrived += np.diag(1 - arrived.sum(axis=1))
        squares += arrived.T @ arrived / rounds
    centred = np.eye(n) - 1 / n
    eigenvalues = np.linalg.eigvalsh(centred @ squares @ centred)
    found = eigenvalues.sum() / (n - 1) if kind == "drawn" else eigenvalues[-1]
    assert expected.contraction == pytest.approx(found, rel=0.02)
    assert expected.doubly_stochastic == (not directed and kind in ("symmetric", "complete", "drawn"))


def test_the_report_says_what_faults_do():
    text = str(ring_in_order().report(faults=faults.message_loss(0.1, directed=True)))
    assert (
        "  faults                       message_loss(0.1, directed=True)\n    messages that arrive       90.0 %\n"
        in text
    )
    assert "rows sum to 1, columns do not: the mean drifts" in text
    assert ring_in_order().report(faults=faults.message_loss(0)).expected is None
    assert "faults" not in str(ring_in_order().report())
    sequence = topologies.sequence([topologies.ring(8, seed=1), topologies.ring(8, seed=2)])
    expected = sequence.report(faults=faults.message_loss(0.1)).expected
    assert expected.contraction is expected.second_eigenvalue is None
    with pytest.raises(ValueError, match="does not fit a topology of 16 nodes"):
        ring_in_order().report(faults=faults.trace(np.array([[True, False]])))
    with pytest.raises(ValueError, match="must be a fault or a list of faults"):
        ring_in_order().report(faults=0.1)


# Devices and comparisons


def test_on_devices_the_rows_of_all_rounds_move():
    turns = topologies.sequence([topologies.ring(20, seed=1), topologies.ring(20, seed=2)])
    report = turns.report(num_devices=2)
    assert report.rows_between_devices >= topologies.ring(20, seed=1).report(num_devices=2).rows_between_devices
    assert "per round, those of all rounds" in str(report)
    drawn = topologies.from_matrices(np.kron(np.eye(2), np.full((2, 2), 0.5)), drawn=True)
    with pytest.raises(ValueError, match="num_devices=2: own matrices is drawn in every round"):
        drawn.report(num_devices=2)


def test_topologies_are_compared_in_a_table_that_fits_a_terminal():
    p = catalogue.PARTITIONS["shards"](catalogue.dataset(), catalogue.NODES).label_distribution
    listed = [build(p) for name, build in catalogue.TOPOLOGIES.items() if name != "hypercube"]
    table = reports.compare(listed, p, num_parameters=7850, faults=faults.message_loss(0.1))
    lines = str(table).splitlines()
    assert lines[0] == f"{len(listed)} topologies of 20 nodes, expected under message_loss(0.1)"
    assert max(map(len, lines)) <= 120
    assert [report.name for report in table.reports] == [topology.name for topology in listed]
    for line, report in zip(lines[3:], table.reports, strict=True):
        assert line.startswith(report.name[:20])
        assert f"{report.label_bias:.4f}  " in line
    frame = table.to_pandas()
    assert frame.loc["ring", "second_eigenvalue"] == pytest.approx(topologies.ring(20).report().second_eigenvalue)
    assert frame.loc["ring", "expected_arrival"] == pytest.approx(0.9)
    assert "num_devices" not in frame
    page = table._repr_html_()
    assert page.count("<tr>") == len(listed) + 1
    assert "neighbourhood skew" in page


def test_columns_without_values_are_left_out_and_labels_may_be_given():
    table = reports.compare({"<a>": topologies.ring(8), "b": topologies.fully_connected(12)})
    assert str(table).splitlines()[0] == "2 topologies of 8 and 12 nodes"
    assert "skew" not in str(table)
    assert "bytes" not in str(table)
    assert repr(table) == "Comparison(['<a>', 'b'])"
    assert "&lt;a&gt;" in table._repr_html_()
    for wrong in ([], {}, [3], topologies.ring(3)):
        with pytest.raises(ValueError, match="must be a list of at least one Topology"):
            reports.compare(wrong)
