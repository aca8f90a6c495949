import dataclasses
import itertools

import matplotlib as mpl
import matplotlib.pyplot as plt
import networkx as nx
import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb, to_rgba
from matplotlib.text import Text

from dcliques_jax import algorithms, cliques, datasets, partitions, plotting, simulate, topologies
from dcliques_jax._plotting import graphs

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
    graphs = [GRAPHS["ring cliques"], GRAPHS["fully_connected cliques"]]
    sent = np.array([graph.report().messages_averaging for graph in graphs])
    made_up = {"accuracy": rng.random((2, 3, 20)), "consensus_distance": distance}
    history = dataclasses.replace(one.history, **made_up, messages=sent[:, None] * one.history.round)
    return dataclasses.replace(
        one, topology=graphs, history=history, provenance=one.provenance | {"messages_per_round": float(sent.mean())}
    )


@pytest.mark.parametrize(
    "draw",
    [
        plotting.plot_accuracy,
        plotting.plot_loss,
        plotting.plot_consensus,
        plotting.plot_accuracy_per_message,
        lambda results: plotting.plot_per_class(results["x"], "c"),
    ],
)
def test_sweeps_are_not_drawn_as_seeds(one, draw):
    history = dataclasses.replace(one.history, extra={"c": np.zeros((2, 3, 20, 4))})
    sweep = dataclasses.replace(one, history=history, provenance=one.provenance | {"sweep": {"rate": [0.1, 0.2]}})
    with pytest.raises(ValueError, match=r"is a sweep: pass result\.best\(\)"):
        draw({"x": sweep})


def test_axes_name_the_examples_that_were_evaluated(one):
    validated = dataclasses.replace(one, provenance=one.provenance | {"evaluate_on": "validation"})
    assert plotting.plot_accuracy({"x": validated}).get_ylabel() == "validation accuracy (%)"
    assert plotting.plot_loss({"x": one, "y": validated}).get_ylabel() == "test or validation loss"
    assert "validation accuracy" in validated._repr_html_()


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


def made_up(result, accuracy):
    """The result with other accuracies [t, nodes]."""
    time = np.arange(len(accuracy))
    arrays = {"accuracy": accuracy, "loss": 3 - accuracy, "consensus_distance": 0.1 + time, "round": 5 * time}
    return dataclasses.replace(result, history=dataclasses.replace(result.history, epoch=1.0 * time, **arrays))


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


@pytest.mark.parametrize("shape", [(4, 5), (5, 4), (2, 9), (3, 3), (40, 45)])
def test_a_grid_is_upright_with_its_longer_side_across(shape):
    topology = topologies.grid(*shape, seed=2)
    centres = centres_of(topology.plot(), len(topology.degrees))
    short, long = sorted(shape)
    columns, rows = (np.unique(coordinate.round(4)) for coordinate in centres.T)
    assert (len(columns), len(rows)) == (long, short)
    lines = np.abs(np.diff(centres[topology.edges], axis=1)[:, 0])
    np.testing.assert_allclose(lines.min(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(lines.max(axis=1), lines.max(), rtol=1e-3)


def test_what_only_resembles_a_grid_is_not_drawn_as_one():
    nearly = nx.grid_2d_graph(3, 4)
    nearly.remove_edge((1, 1), (1, 2))
    nearly.add_edge((0, 0), (1, 1))  # a diagonal: as many nodes and edges as before
    others = [nearly, nx.grid_2d_graph(3, 4, periodic=True), nx.ladder_graph(2), nx.lollipop_graph(4, 4)]
    for graph in others:
        topology = topologies.from_networkx(graph)
        centres = centres_of(topology.plot(), topology.num_nodes)
        assert len(np.unique(centres.round(4), axis=0)) == topology.num_nodes
        assert len(np.unique(centres[:, 0].round(4))) * len(np.unique(centres[:, 1].round(4))) != topology.num_nodes


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


def one_way(n, offset):
    return (np.eye(n) + np.roll(np.eye(n), -offset, axis=1)) / 2


def test_a_sequence_has_a_panel_per_round_with_nodes_in_the_same_places():
    turns = topologies.from_matrices([one_way(16, offset) for offset in (1, 2, 4)], name="one peer")
    axes = turns.plot(np.eye(16))
    assert [panel.get_title() for panel in axes] == [f"round {turn} of 3" for turn in (1, 2, 3)]
    assert axes[0].figure.get_suptitle() == "one peer"
    places = [centres_of(panel, 16) for panel in axes]
    for turn, panel in enumerate(axes):
        np.testing.assert_array_equal(places[turn], places[0])
        assert sum(len(lines.get_segments()) for lines in panel.collections[:2]) == 16
    lengths = np.linalg.norm(np.diff(places[0], axis=0), axis=1)
    np.testing.assert_allclose(lengths, lengths[0], rtol=1e-4)  # those that meet in the first round are neighbours
    assert len(axes[0].figure.axes) == 4  # and the bar of labels
    axes[0].figure.canvas.draw()


def test_at_most_eight_rounds_are_drawn_and_saved(tmp_path):
    turns = topologies.from_matrices([one_way(12, offset) for offset in range(1, 12)])
    axes = turns.plot()
    assert [panel.get_title() for panel in axes][-1] == "round 8 of 11"
    plotting.save(axes, tmp_path / "rounds.svg")
    assert "round 8 of 11</text>" in (tmp_path / "rounds.svg").read_text()


def test_in_given_axes_the_links_of_all_rounds_are_drawn_together():
    turns = topologies.sequence([topologies.ring(20, seed=1), topologies.ring(20, seed=2)], name="two rings")
    ax = plt.subplots()[1]
    assert turns.plot(LABELS, ax=ax) is ax
    assert sum(len(lines.get_segments()) for lines in ax.collections[:2]) == len(turns.edges)
    assert ax.get_title() == "two rings"


def test_arrows_point_from_the_sender_to_the_receiver():
    axes = topologies.from_matrices(one_way(6, 1)).plot()
    heads = axes.collections[2].get_paths()
    centres, radius = centres_of(axes, 6), nodes_of(axes).get_paths()[0].get_extents().width / 2
    assert len(heads) == 6
    arcs = [((i - 1) % 6, i) for i in range(6)]  # node i hears from i - 1
    for head, (sender, receiver) in zip(heads, sorted(arcs), strict=True):
        tip, left, right = head.vertices[:3]
        assert np.linalg.norm(tip - centres[receiver]) == pytest.approx(radius, rel=1e-3)
        base = (left + right) / 2
        assert np.linalg.norm(base - centres[sender]) < np.linalg.norm(tip - centres[sender])
    assert len(topologies.ring(6).plot().collections) == 3  # lines have no heads if they carry both ways


@pytest.mark.parametrize("given", [False, True])
def test_of_drawn_graphs_one_round_is_drawn(given):
    pairs = np.kron(np.eye(10), np.full((2, 2), 0.5))
    drawn = topologies.from_matrices([pairs, np.roll(pairs, (1, 1), axis=(0, 1))], drawn=True, name="pairs")
    axes = drawn.plot(LABELS, ax=plt.subplots()[1] if given else None)
    assert axes.get_title() == "pairs, one round"
    assert sum(len(lines.get_segments()) for lines in axes.collections[:2]) == 10


def test_a_partition_is_drawn_as_its_counts():
    axes = DATA.plot()
    (image,) = axes.images
    np.testing.assert_array_equal(image.get_array(), DATA.label_counts.T)
    assert image.get_clim() == (0, DATA.label_counts.max())
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("node", "label")
    assert axes.figure.axes[1].get_ylabel() == "examples"
    axes.figure.canvas.draw()


def with_classes(result, values=None, **changes):
    """The result with made-up accuracies on five classes."""
    if values is None:
        values = np.random.default_rng(0).random((*result.history.accuracy.shape, 5))
    history = dataclasses.replace(result.history, extra={"per_class_accuracy": values})
    return dataclasses.replace(result, history=history, **changes)


def test_classes_are_drawn_for_every_node_clique_by_clique(one):
    result = with_classes(one)
    axes = plotting.plot_per_class(result)
    (image,) = axes.images
    ids = result.topology.clique_ids
    order = np.argsort(ids, kind="stable")
    assert (np.diff(order) < 0).any()
    last = result.history.extra["per_class_accuracy"][-1]
    np.testing.assert_allclose(image.get_array(), 100 * last[order])
    assert image.get_clim() == (0, 100)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("class", "node, clique by clique")
    assert axes.figure.axes[1].get_ylabel() == "accuracy (%)"
    gaps = [path.vertices[0, 1] for path in axes.collections[0].get_paths()]
    np.testing.assert_allclose(gaps, np.cumsum(np.bincount(ids))[:-1] - 0.5)


def test_rows_are_named_by_their_nodes(one):
    axes = plotting.plot_per_class(with_classes(one))
    axes.figure.canvas.draw()
    order = np.argsort(one.topology.clique_ids, kind="stable")
    rows = [(tick.get_position()[1], tick.get_text()) for tick in axes.get_yticklabels()]
    named = {int(row): text for row, text in rows if text}
    assert len(named) > 3
    assert named == {row: str(order[row]) for row in named}


def test_without_cliques_nodes_are_drawn_in_their_order(one):
    result = with_classes(one, topology=GRAPHS["ring"])
    axes = plotting.plot_per_class(result)
    np.testing.assert_allclose(axes.images[0].get_array(), 100 * result.history.extra["per_class_accuracy"][-1])
    assert axes.get_ylabel() == "node"
    assert not axes.collections


def test_classes_of_several_seeds_are_their_mean_and_blank_where_there_is_none(several):
    values = np.random.default_rng(0).random((2, 3, 20, 5))
    values[..., 3] = np.nan
    values[0, ..., 2] = np.nan
    history = dataclasses.replace(several.history, eval_nodes=np.tile(np.arange(20), (2, 1)))
    result = with_classes(dataclasses.replace(several, history=history), values)
    found = plotting.plot_per_class(result).images[0].get_array()
    np.testing.assert_allclose(found[:, :2], 100 * values[:, -1, :, :2].mean(axis=0))
    np.testing.assert_allclose(found[:, 2], 100 * values[1, -1, :, 2])
    assert np.ma.getmaskarray(found)[:, 3].all()


def test_classes_of_some_nodes_are_drawn(one):
    nodes = np.array([3, 8, 17])
    history = dataclasses.replace(one.history, accuracy=one.history.accuracy[:, nodes], eval_nodes=nodes)
    result = with_classes(dataclasses.replace(one, history=history))
    assert plotting.plot_per_class(result).images[0].get_array().shape == (3, 5)


def test_classes_must_have_been_measured(one, several):
    with pytest.raises(ValueError, match=r"no metric 'per_class_accuracy' .*metrics.per_class_accuracy\(model\)"):
        plotting.plot_per_class(one)
    with pytest.raises(ValueError, match=r"shape \(3, 20\): pass the name of one that is \[t, nodes, classes\]"):
        plotting.plot_per_class(with_classes(one, one.history.accuracy))
    with pytest.raises(ValueError, match="no result to draw"):
        plotting.plot_per_class({"one": one})
    history = dataclasses.replace(several.history, eval_nodes=np.stack([np.arange(20), np.arange(20)[::-1]]))
    with pytest.raises(ValueError, match="other nodes were evaluated for every seed"):
        plotting.plot_per_class(with_classes(dataclasses.replace(several, history=history)))
    assert not plt.get_fignums()


def test_seeds_give_a_band_and_mean_lines(several):
    axes = several.plot(label="two")
    percent = 100 * several.history.accuracy
    mean, least, most = axes.lines
    np.testing.assert_allclose(mean.get_ydata(), percent.mean(axis=(0, 2)))
    np.testing.assert_allclose(least.get_ydata(), percent.min(axis=2).mean(axis=0))
    np.testing.assert_allclose(most.get_ydata(), percent.max(axis=2).mean(axis=0))
    of_seeds = percent.mean(axis=2)
    np.testing.assert_allclose(band(axes), [of_seeds.min(axis=0), of_seeds.max(axis=0)])
    assert legend(axes) == ["two", "min and max over nodes", "min and max over seeds"]


def test_loss_is_drawn_like_accuracy(one):
    axes = plotting.plot_loss({"one": one}, x="round")
    loss = one.history.loss
    for line, values in zip(axes.lines, (loss.mean(axis=1), loss.min(axis=1), loss.max(axis=1)), strict=True):
        np.testing.assert_array_equal(line.get_xdata(), one.history.round)
        np.testing.assert_allclose(line.get_ydata(), values, rtol=1e-6)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("rounds", "test loss")
    assert legend(axes) == ["one", "min and max over nodes"]


def test_the_legend_explains_thin_lines_by_a_thin_line(one):
    axes = plotting.plot_accuracy({"one": one, "two": one})
    mean, least, *_ = axes.lines
    *_, explained = axes.get_legend().get_lines()
    assert explained.get_linewidth() == least.get_linewidth() < mean.get_linewidth()
    assert "min and max over nodes" not in legend(plotting.plot_consensus({"one": one}))


def test_one_seed_has_no_band(one):
    for plot in (plotting.plot_accuracy, plotting.plot_consensus, plotting.plot_accuracy_per_message):
        assert not plot({"one": one}).collections


def test_accuracy_is_drawn_over_rounds_too(one):
    axes = plotting.plot_accuracy({"one": one}, x="round")
    np.testing.assert_array_equal(axes.lines[0].get_xdata(), one.history.round)
    assert axes.get_xlabel() == "rounds"
    with pytest.raises(ValueError, match="x='step' is unknown: choose one of epoch, round"):
        plotting.plot_accuracy({"one": one}, x="step")


def test_consensus_is_drawn_and_zeros_are_marked_at_the_bottom(one, several):
    axes = plotting.plot_consensus({"one": one, "two": several})
    first, first_zero, second, second_zero = axes.lines
    np.testing.assert_array_equal(first.get_xdata(), [0, 1, 2])
    np.testing.assert_allclose(first.get_ydata()[1:], one.history.consensus_distance[1:])
    distance = several.history.consensus_distance[:, 1:]
    np.testing.assert_allclose(second.get_ydata()[1:], distance.mean(axis=0))
    np.testing.assert_allclose(band(axes), [distance.min(axis=0), distance.max(axis=0)])
    assert axes.get_yscale() == "log"
    for zero, curve in ((first_zero, first), (second_zero, second)):
        assert zero.get_color() == curve.get_color()
        shown = axes.transAxes.inverted().transform(zero.get_transform().transform(zero.get_xydata()))
        np.testing.assert_allclose(shown[:, 1], 0, atol=1e-6)
        np.testing.assert_array_equal(zero.get_xdata(), [0])
    assert legend(axes) == ["one", "two", "min and max over seeds", "zero"]


def test_models_that_always_agree_are_a_row_of_zeros(one):
    history = dataclasses.replace(one.history, consensus_distance=np.zeros(3))
    axes = plotting.plot_consensus({"equal": dataclasses.replace(one, history=history)})
    np.testing.assert_array_equal(axes.lines[1].get_xdata(), one.history.epoch)
    axes.figure.canvas.draw()


def test_without_zeros_the_legend_does_not_speak_of_them(one):
    history = dataclasses.replace(one.history, consensus_distance=np.ones(3))
    assert legend(plotting.plot_consensus({"apart": dataclasses.replace(one, history=history)})) == ["apart"]


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
    unknown = np.full_like(one.history.messages, np.nan)
    loaded = dataclasses.replace(one, history=dataclasses.replace(one.history, messages=unknown))
    with pytest.raises(ValueError, match=r"'a' does not tell what it sends: pass .* messages=\{'a': ...\}"):
        plotting.plot_accuracy_per_message({"a": loaded})
    axes = plotting.plot_accuracy_per_message({"a": loaded}, messages={"a": 10})
    np.testing.assert_allclose(axes.lines[0].get_xdata(), 10 * one.history.round[1:])
    with pytest.raises(ValueError, match=r"messages are given for \['b'\], but the results are \['a'\]"):
        plotting.plot_accuracy_per_message({"a": loaded}, messages={"b": 10})


def test_an_algorithm_of_ones_own_is_not_counted_as_dsgd():
    def step(params, gradients, state, network, round):
        return params, state

    silent = algorithms.Algorithm(algorithms.over_topology(), lambda params, network: (), step)
    result = simulate(topologies.ring(20), DATA, algorithm=silent, epochs=1, progress=False)
    with pytest.raises(ValueError, match=r"'own' does not tell what it sends"):
        plotting.plot_accuracy_per_message({"own": result})
    assert not plt.get_fignums()
    axes = plotting.plot_accuracy_per_message({"own": result}, messages={"own": 5})
    np.testing.assert_allclose(axes.lines[0].get_xdata(), 5 * result.history.round[1:])


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
    "loss": lambda one, ax: plotting.plot_loss({"one": one}, ax=ax),
    "result": lambda one, ax: one.plot(ax),
    "consensus": lambda one, ax: plotting.plot_consensus({"one": one}, ax=ax),
    "messages": lambda one, ax: plotting.plot_accuracy_per_message({"one": one}, ax=ax),
    "classes": lambda one, ax: plotting.plot_per_class(with_classes(one), ax=ax),
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
        assert len({to_hex(colour) for colour in graphs.class_colours(count)}) == count


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_for_a_column_have_its_width_small_text_and_fine_lines(one, name):
    before = dict(mpl.rcParams)
    with plotting.style("column"):
        axes = PICTURES[name](one, None)
    assert dict(mpl.rcParams) == before
    axes.figure.canvas.draw()  # ticks are made late
    assert axes.figure.get_figwidth() == pytest.approx(3.3)
    written = [text for text in axes.figure.findobj(Text) if text.get_text()]
    assert {text.get_fontsize() for text in written} == {8}
    if axes.lines:
        assert max(line.get_linewidth() for line in axes.lines) == 1.2


def test_figures_are_as_wide_as_matplotlib_is_told():
    with plotting.style("page"):
        assert topologies.ring(9).plot().figure.get_figwidth() == pytest.approx(6.9)
    with mpl.rc_context({"figure.figsize": (5, 5)}):
        assert topologies.ring(9).plot().figure.get_figwidth() == 5
    with pytest.raises(ValueError, match="size='poster' is unknown: choose one of column, page"):
        plotting.style("poster")


def boxes(axes):
    """Legend, axes and figure as they come out, in pixels."""
    axes.figure.canvas.draw()
    return axes.get_legend().get_window_extent(), axes.get_window_extent(), axes.figure.bbox


def drawn_points(axes):
    """Points along all lines, in pixels, closely spaced."""
    for line in axes.lines:
        x, y = line.get_transform().transform(line.get_xydata()).T
        places = np.linspace(0, len(x) - 1, 1000)
        yield from zip(np.interp(places, range(len(x)), x), np.interp(places, range(len(y)), y), strict=True)


def rising(count):
    """Curves that leave the lower right corner free."""
    return {f"curve {k}": np.tile(1 - np.exp(-np.arange(30) / (k + 2)), (20, 1)).T for k in range(count)}


def everywhere(count):
    """Curves that leave no room for a legend."""
    return {f"curve {k}": np.tile(np.arange(30) % 2 + 0.1 * k, (20, 1)).T / (1 + 0.1 * count) for k in range(count)}


@pytest.mark.parametrize("size", ["column", "page"])
def test_a_legend_that_covers_nothing_stays_inside(one, size):
    with plotting.style(size):
        axes = plotting.plot_accuracy({name: made_up(one, values) for name, values in rising(2).items()})
    box, inside, _ = boxes(axes)
    assert inside.contains(*box.min)
    assert inside.contains(*box.max)
    assert not any(box.contains(x, y) for x, y in drawn_points(axes))


@pytest.mark.parametrize("size", ["column", "page"])
@pytest.mark.parametrize("count", [2, 12])
@pytest.mark.parametrize("layout", [None, "constrained", "new figure"])
def test_a_legend_that_would_cover_curves_goes_below_the_axes(one, size, count, layout):
    results = {name: made_up(one, values) for name, values in everywhere(count).items()}
    with plotting.style(size):
        axes = None if layout == "new figure" else plt.subplots(figsize=(4.5, 6), layout=layout)[1]
        axes = plotting.plot_accuracy(results, ax=axes)
    box, inside, figure = boxes(axes)
    assert box.y1 < axes.xaxis.label.get_window_extent().y0
    assert not any(box.contains(x, y) for x, y in drawn_points(axes))
    for corner in (box.min, box.max):
        assert figure.contains(*corner)
    assert inside.height > 1.2 * axes.figure.dpi  # the curves still have room


def test_a_legend_is_placed_again_after_limits_changed(one):
    axes = plotting.plot_accuracy({name: made_up(one, values) for name, values in everywhere(2).items()})
    axes.set_ylim(0, 500)
    plotting.place_legend(axes)
    box, inside, _ = boxes(axes)
    assert inside.contains(*box.min)
    assert inside.contains(*box.max)


def test_histograms_and_bands_are_not_covered_either(several):
    flat = np.tile(np.linspace(0, 1, 3)[:, None, None], (1, 3, 20))  # three seeds: a band over the whole axes
    history = dataclasses.replace(several.history, accuracy=flat)
    axes = plotting.plot_accuracy({"band": dataclasses.replace(several, history=history)})
    box, inside, _ = boxes(axes)
    assert box.y1 < inside.y0
    skew = np.linspace(0.5, 0, 300)  # of cliques of two nodes, as many with every skew
    p = np.stack([0.5 + skew, 0.5 - skew], axis=1)
    axes = plotting.plot_skew(np.concatenate([p, p[:, ::-1]]), {"all": np.arange(600)})
    box, inside, _ = boxes(axes)
    assert box.y1 < inside.y0


def look(line):
    return to_hex(line.get_color()), line.get_linestyle(), str(line._dash_pattern)


def test_twenty_curves_all_look_different_and_neighbours_differ_in_colour_and_dashes(one):
    axes = plotting.plot_consensus({str(k): made_up(one, values) for k, values in enumerate(everywhere(20).values())})
    looks = [look(line) for line in axes.lines]
    assert len(set(looks)) == 20
    for (colour, *dashes), (next_colour, *next_dashes) in itertools.pairwise(looks):
        assert colour != next_colour
        assert dashes != next_dashes
    means = plotting.plot_accuracy({"one": one, "two": one}).lines
    assert [to_hex(line.get_color()) for line in means[:3]] == [look(means[0])[0]] * 3


# Machado, Oliveira and Fernandes (2009), severity 1, for linear RGB.
SEEN = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def cielab(colour, seen):
    """CIELAB of a colour under D65 as it is seen."""
    encoded = np.array(to_rgb(colour))
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.119192, 0.9503041]]
    )
    ratio = to_xyz @ np.clip(seen @ linear, 0, 1) / to_xyz.sum(axis=1)
    x, y, z = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SEEN)
def test_colours_are_told_apart_by_colour_blind_readers(sight):
    seen = np.array(SEEN[sight])
    for one, two in itertools.combinations(plotting.COLOURS, 2):
        difference = np.linalg.norm(cielab(one, seen) - cielab(two, seen))  # CIE76
        assert difference >= 15, (one, two)


@pytest.mark.parametrize("inside_style", [True, False])
def test_saved_text_is_text(tmp_path, inside_style):
    before = dict(mpl.rcParams)
    with plotting.style("column"):
        axes = topologies.ring(9).plot()
        if inside_style:
            for name in ("ring.svg", "ring.pdf"):
                axes.figure.savefig(tmp_path / name)
    if not inside_style:
        plotting.save(axes, tmp_path / "ring.svg")
        plotting.save(axes.figure, str(tmp_path / "ring.pdf"))
    assert dict(mpl.rcParams) == before
    assert ">ring</text>" in (tmp_path / "ring.svg").read_text()
    pdf = (tmp_path / "ring.pdf").read_bytes()
    assert b"/FontFile2" in pdf  # TrueType
    assert b"/Type3" not in pdf


def test_options_of_matplotlib_are_passed_on_when_saving(tmp_path):
    with plotting.style("column"):
        axes = topologies.ring(9).plot()
    plotting.save(axes, tmp_path / "ring.png", dpi=100)
    assert plt.imread(tmp_path / "ring.png").shape[1] == 330
