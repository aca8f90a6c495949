import dataclasses

import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgba

from dcliques_jax import algorithms, cliques, datasets, partitions, plotting, simulate, topologies

DATA = partitions.shards(datasets.synthetic(num_train=400), 20, seed=1)
LABELS = DATA.label_distribution
GRAPHS = {
    **{
        f"{inter} cliques": topologies.d_cliques(LABELS, clique_size=4, inter=inter)
        for inter in topologies.wirings.INTER
    },
    "uneven cliques": topologies.d_cliques(LABELS, clique_size=7),
    "one clique": topologies.d_cliques(LABELS, clique_size=20),
    "cliques of one": topologies.d_cliques(LABELS, clique_size=1, inter="ring"),
    "ring": topologies.ring(20),
    "grid": topologies.grid(4, 5),
    "fully connected": topologies.fully_connected(20),
    "random": topologies.random_regular(20, 4),
    "star": topologies.from_networkx(nx.star_graph(19)),
    "path": topologies.from_networkx(nx.path_graph(20)),
}


@pytest.fixture(scope="module")
def one():
    return simulate(GRAPHS["fully_connected cliques"], DATA, epochs=2, progress=False)


@pytest.fixture(scope="module")
def several(one):
    """A result of two seeds with made-up numbers, which takes no time to compile."""
    rng = np.random.default_rng(0)
    distance = rng.random((2, 3))
    distance[:, 0] = 0
    history = dataclasses.replace(one.history, accuracy=rng.random((2, 3, 20)), consensus_distance=distance)
    graphs = [GRAPHS["ring cliques"], GRAPHS["fully_connected cliques"]]
    return dataclasses.replace(one, topology=graphs, history=history)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    plt.close("all")


def nodes_of(axes):
    return axes.collections[-1]


def centres_of(axes, num_nodes):
    """The middle of every node of one slice, from what is drawn."""
    paths = nodes_of(axes).get_paths()
    assert len(paths) == num_nodes
    return np.array([(path.get_extents().min + path.get_extents().max) / 2 for path in paths])


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def band(axes, number=0):
    """Lowest and highest value of a band at each of its places."""
    vertices = axes.collections[number].get_paths()[0].vertices
    places = np.unique(vertices[:, 0])
    return np.array([[f(vertices[vertices[:, 0] == x, 1]) for x in places] for f in (np.min, np.max)])


@pytest.mark.parametrize("name", GRAPHS)
def test_a_topology_is_drawn_whole(name):
    topology = GRAPHS[name]
    axes = topology.plot()
    inside, between = axes.collections[:2]
    assert len(inside.get_segments()) + len(between.get_segments()) == len(topology.edges)
    if topology.clique_ids is not None:
        first, second = topology.clique_ids[topology.edges].T
        assert len(between.get_segments()) == (first != second).sum()
        assert inside.get_alpha() < between.get_alpha()
    centres = centres_of(axes, 20)
    drawn = np.array(inside.get_segments() + between.get_segments())
    np.testing.assert_allclose(np.sort(drawn.ravel()), np.sort(centres[topology.edges].ravel()), atol=1e-6)
    width = nodes_of(axes).get_paths()[0].get_extents().width
    assert np.linalg.norm(centres, axis=1).max() + width / 2 < 1.001
    if name not in ("random", "star"):  # where nodes of equal distances may come to lie over each other
        apart = np.linalg.norm(centres[:, None] - centres, axis=2) + 10 * np.eye(20)
        assert apart.min() > width
    assert axes.get_title() == topology.name
    axes.figure.canvas.draw()


def test_nodes_of_a_clique_are_drawn_together_and_linked_ones_face_each_other():
    topology = GRAPHS["ring cliques"]
    centres, ids = centres_of(topology.plot(), 20), topology.clique_ids
    middles = np.array([centres[ids == clique].mean(axis=0) for clique in range(5)])
    nearest = np.linalg.norm(centres[:, None] - middles, axis=2).argmin(axis=1)
    np.testing.assert_array_equal(nearest, ids)
    between = topology.edges[ids[topology.edges[:, 0]] != ids[topology.edges[:, 1]]]
    lengths = np.linalg.norm(np.diff(centres[between], axis=1), axis=2)
    assert lengths.mean() < 0.8 * np.linalg.norm(np.diff(middles[ids[between]], axis=1), axis=2).mean()


def test_a_ring_is_a_circle_in_its_order():
    topology = topologies.ring(30, seed=4)
    centres = centres_of(topology.plot(), 30)
    lengths = np.linalg.norm(np.diff(centres[topology.edges], axis=1)[:, 0], axis=1)
    np.testing.assert_allclose(lengths, lengths[0], rtol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(centres, axis=1), np.linalg.norm(centres[0]), rtol=1e-4)


def test_a_grid_is_drawn_as_one():
    topology = topologies.grid(4, 5, seed=2)
    centres = centres_of(topology.plot(), 20)
    lengths = np.linalg.norm(np.diff(centres[topology.edges], axis=1)[:, 0], axis=1)
    assert lengths.max() < 1.3 * lengths.min()


def test_a_fractal_is_circles_of_circles():
    topology = topologies.d_cliques(np.eye(3)[np.arange(27) % 3], clique_size=3, inter="fractal")
    centres, ids = centres_of(topology.plot(), 27), topology.clique_ids
    groups = np.array([centres[ids // 3 == group].mean(axis=0) for group in range(3)])
    np.testing.assert_array_equal(np.linalg.norm(centres[:, None] - groups, axis=2).argmin(axis=1), ids // 3)


def test_nodes_are_pies_of_their_labels():
    p = np.array([[0.5, 0.5, 0], [0.25, 0.25, 0.5], [0, 0, 1]])
    axes = topologies.fully_connected(3).plot(p)
    slices = nodes_of(axes)
    blue, orange, red = (to_hex(colour) for colour in plotting.CLASS_COLOURS[:3])
    assert [to_hex(colour) for colour in slices.get_facecolors()] == [blue, orange, blue, orange, red, red]
    areas = [polygon_area(path.to_polygons()[0]) for path in slices.get_paths()]
    np.testing.assert_allclose(np.array(areas[:5]) / areas[5], [0.5, 0.5, 0.25, 0.25, 0.5], rtol=0.01)
    _, bar = axes.figure.axes
    assert [text.get_text() for text in bar.get_yticklabels()] == ["0", "1", "2"]


def polygon_area(polygon):
    x, y = polygon.T
    return abs(np.dot(x[:-1], y[1:]) - np.dot(x[1:], y[:-1])) / 2


def test_many_nodes_are_dots_of_their_most_frequent_label():
    p = np.random.default_rng(0).dirichlet(np.ones(12), 210)
    axes = topologies.d_cliques(p, max_steps=0, inter="ring").plot(p)
    dots = nodes_of(axes)
    assert len(dots.get_paths()) == 210
    colours = dots.get_facecolors()
    for label in range(12):
        assert len(np.unique(colours[p.argmax(axis=1) == label], axis=0)) == 1
    assert len(np.unique(colours, axis=0)) == 12


def test_more_edges_than_can_be_told_apart_are_sampled_and_the_title_says_so():
    axes = topologies.fully_connected(210).plot()
    assert sum(len(lines.get_segments()) for lines in axes.collections[:-1]) == 20_000
    assert axes.get_title() == "fully connected, 20,000 of 21,945 edges"


def test_large_graphs_are_placed_without_all_distances():
    axes = topologies.random_regular(1502, 4).plot()
    assert len(nodes_of(axes).get_paths()) == 1502


def test_the_same_topology_gives_the_same_picture():
    first, second = (centres_of(GRAPHS["random"].plot(), 20) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_label_distribution_must_fit_the_topology():
    with pytest.raises(ValueError, match="20 rows, the topology 9 nodes"):
        topologies.ring(9).plot(LABELS)
    with pytest.raises(ValueError, match=r"pass its \.label_distribution"):
        topologies.ring(20).plot(DATA)
    assert not plt.get_fignums()


def test_a_partition_is_drawn_as_its_counts():
    axes = DATA.plot()
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), DATA.label_counts.T)
    assert image.get_clim() == (0, DATA.label_counts.max())
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("node", "label")
    assert axes.figure.axes[1].get_ylabel() == "examples"
    axes.figure.canvas.draw()


def test_seeds_give_a_band_and_mean_lines(several):
    axes = several.plot(label="two")
    percent = 100 * several.history.accuracy
    mean, least, most = axes.lines
    np.testing.assert_allclose(mean.get_ydata(), percent.mean(axis=(0, 2)))
    np.testing.assert_allclose(least.get_ydata(), percent.min(axis=2).mean(axis=0))
    np.testing.assert_allclose(most.get_ydata(), percent.max(axis=2).mean(axis=0))
    of_seeds = percent.mean(axis=2)
    np.testing.assert_allclose(band(axes), [of_seeds.min(axis=0), of_seeds.max(axis=0)])
    assert legend(axes) == ["two"]


def test_one_seed_has_no_band(one):
    for plot in (plotting.plot_accuracy, plotting.plot_consensus, plotting.plot_accuracy_per_message):
        assert not plot({"one": one}).collections


def test_accuracy_is_drawn_over_rounds_too(one):
    axes = plotting.plot_accuracy({"one": one}, x="round")
    np.testing.assert_array_equal(axes.lines[0].get_xdata(), one.history.round)
    assert axes.get_xlabel() == "rounds"
    with pytest.raises(ValueError, match="x='step' is unknown: choose one of epoch, round"):
        plotting.plot_accuracy({"one": one}, x="step")


def test_consensus_is_drawn_where_it_is_not_zero(one, several):
    axes = plotting.plot_consensus({"one": one, "two": several})
    first, second = axes.lines
    np.testing.assert_array_equal(first.get_xdata(), [1, 2])
    np.testing.assert_allclose(first.get_ydata(), one.history.consensus_distance[1:])
    distance = several.history.consensus_distance[:, 1:]
    np.testing.assert_allclose(second.get_ydata(), distance.mean(axis=0))
    np.testing.assert_allclose(band(axes), [distance.min(axis=0), distance.max(axis=0)])
    assert axes.get_yscale() == "log"
    assert legend(axes) == ["one", "two"]


def test_models_that_always_agree_have_no_consensus_curve(one):
    history = dataclasses.replace(one.history, consensus_distance=np.zeros(3))
    axes = plotting.plot_consensus({"equal": dataclasses.replace(one, history=history)})
    assert len(axes.lines[0].get_xdata()) == 0
    axes.figure.canvas.draw()


def test_accuracy_is_drawn_per_message(one, several):
    plain = algorithms.dsgd(clique_averaging=False)
    alone = simulate(one.topology, DATA, algorithm=plain, epochs=1, progress=False)
    axes = plotting.plot_accuracy_per_message({"one": one, "alone": alone, "two": several})
    report = one.topology.report()
    np.testing.assert_allclose(axes.lines[0].get_xdata(), one.history.round[1:] * report.messages_averaging)
    np.testing.assert_allclose(axes.lines[0].get_ydata(), 100 * one.history.accuracy.mean(axis=1)[1:], rtol=1e-6)
    np.testing.assert_allclose(axes.lines[1].get_xdata(), alone.history.round[1:] * report.messages)
    each = np.mean([graph.report().messages_averaging for graph in several.topology])
    np.testing.assert_allclose(axes.lines[2].get_xdata(), several.history.round[1:] * each)
    of_seeds = 100 * several.history.accuracy.mean(axis=2)[:, 1:]
    np.testing.assert_allclose(band(axes), [of_seeds.min(axis=0), of_seeds.max(axis=0)])
    assert axes.get_xscale() == "log"


def test_messages_are_asked_for_where_they_are_not_known(one):
    loaded = dataclasses.replace(one, state=None)
    with pytest.raises(ValueError, match=r"'a' does not tell .* messages=\{'a': 7\} if over cliques and 4 if"):
        plotting.plot_accuracy_per_message({"a": loaded})
    axes = plotting.plot_accuracy_per_message({"a": loaded}, messages={"a": 10})
    np.testing.assert_allclose(axes.lines[0].get_xdata(), 10 * one.history.round[1:])
    with pytest.raises(ValueError, match=r"messages are given for \['b'\], but the results are \['a'\]"):
        plotting.plot_accuracy_per_message({"a": loaded}, messages={"b": 10})


def test_skews_are_drawn_as_histograms():
    random = [cliques.random_cliques(20, 4, seed=seed) for seed in range(3)]
    swapped = cliques.greedy_swap(LABELS, 4)
    axes = plotting.plot_skew(LABELS, {"random": random, "Greedy Swap": swapped})
    assert legend(axes) == ["random", "Greedy Swap"]
    most = max(cliques.skew(ids, LABELS).max() for ids in random)
    for patch, several in zip(axes.patches, [random, [swapped]], strict=True):
        skews = np.concatenate([cliques.skew(ids, LABELS) for ids in several])
        counts = np.histogram(skews, np.linspace(0, most, 31))[0]
        assert patch.get_xy()[:, 1].max() == pytest.approx(100 * counts.max() / len(skews))
    no_skew = plotting.plot_skew(np.full((4, 2), 0.5), {"equal": [0, 0, 1, 1]})
    assert no_skew.patches[0].get_xy()[:, 1].max() == 100


@pytest.mark.parametrize("wrong", [{}, None, "result"])
def test_there_must_be_something_to_draw(wrong):
    for plot in (plotting.plot_accuracy, plotting.plot_consensus, plotting.plot_accuracy_per_message):
        with pytest.raises(ValueError, match="no result to draw"):
            plot(wrong)
    with pytest.raises(ValueError, match="no clique_ids to draw"):
        plotting.plot_skew(LABELS, wrong)
    assert not plt.get_fignums()


PICTURES = {
    "topology": lambda one, ax: GRAPHS["fully_connected cliques"].plot(LABELS, ax=ax),
    "partition": lambda one, ax: DATA.plot(ax),
    "accuracy": lambda one, ax: plotting.plot_accuracy({"one": one}, ax=ax),
    "consensus": lambda one, ax: plotting.plot_consensus({"one": one}, ax=ax),
    "messages": lambda one, ax: plotting.plot_accuracy_per_message({"one": one}, ax=ax),
    "skew": lambda one, ax: plotting.plot_skew(LABELS, {"one": GRAPHS["fully_connected cliques"].clique_ids}, ax=ax),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_go_into_given_axes(one, name):
    figure, (_, right) = plt.subplots(1, 2)
    assert PICTURES[name](one, right) is right
    assert plt.get_fignums() == [figure.number]
    assert PICTURES[name](one, None).figure is not figure


@pytest.mark.parametrize("name", PICTURES)
def test_text_and_edges_are_light_on_dark_grounds(one, name):
    with plt.style.context("dark_background"):
        _, axes = plt.subplots()
    PICTURES[name](one, axes)
    axes.figure.canvas.draw()
    assert to_rgba(axes.title.get_color()) == to_rgba(axes.xaxis.label.get_color()) == to_rgba("white")
    if name == "topology":
        for lines in axes.collections[:2]:
            np.testing.assert_array_equal(lines.get_colors()[0, :3], [1, 1, 1])


def test_classes_have_colours_of_their_own():
    for count in (1, 7, 10, 11, 100):
        assert len({to_hex(colour) for colour in plotting._class_colours(count)}) == count
