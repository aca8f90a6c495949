import numpy as np
import pytest
import scipy.sparse

import catalogue
import reference
from dcliques_jax import cliques, mixing, partitions, reports, topologies


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
    monkeypatch.setattr(reports, "_MOST_DISTANCES", 40 * 64)
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
