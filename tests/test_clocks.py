"""Clocks: seconds by hand, and histories over messages, bytes and seconds."""

import numpy as np
import optax
import pytest

from dcliques_jax import algorithms, clocks, datasets, partitions, plotting, simulate, topologies
from dcliques_jax.results import Result

DATA = partitions.shards(datasets.synthetic(num_train=200), 10)
BYTES = 4 * 170


def run(topology, algorithm, **more):
    return simulate(topology, DATA, algorithm=algorithm, epochs=1, progress=False, **more)


def test_the_slowest_node_decides():
    clock = clocks.synchronous(latency=[0.1, 0.2], bandwidth=[8e3, 16e3], compute=[1.0, 0.5], download=[8e3, 4e3])
    # The first node takes 1 + 0.1 + max(2, 1), the second 0.5 + 0.2 + max(0.5, 4); then with two phases and nothing.
    found = clock.seconds(sent=[[2000, 1000], [0, 0]], received=[[1000, 2000], [0, 0]], phases=[1, 2])
    np.testing.assert_allclose(found, [4.7, 1.2])


def test_rounds_of_a_star_wait_for_its_hub():
    star = topologies.from_edges(10, [[0, leaf] for leaf in range(1, 10)])
    result = run(star, algorithms.dsgd())
    each = 50e-3 + 8 * 9 * BYTES / 20e6
    np.testing.assert_allclose(result.seconds(clocks.WAN), [0, 4 * each])
    assert star.report(num_parameters=170, clock=clocks.WAN).seconds == pytest.approx(each)


def test_phases_are_waited_for():
    cliques = topologies.d_cliques(DATA.label_distribution, clique_size=5)
    still = clocks.synchronous(latency=1.0, bandwidth=1e18)
    for algorithm, phases in (
        (algorithms.dsgd(), 2),  # gradients, then models
        (algorithms.dsgd(clique_averaging=False), 1),
        (algorithms.repeated_gossip(algorithms.dsgd(clique_averaging=False), 3), 3),
        (algorithms.local_steps(algorithms.dsgd(), 2), 1),  # two phases in every second round
    ):
        np.testing.assert_allclose(run(cliques, algorithm).seconds(still)[-1], 4 * phases, rtol=1e-9)


def test_sequences_take_what_their_rounds_take():
    sequence = topologies.sequence([topologies.ring(10), topologies.fully_connected(10)])
    seconds = run(sequence, algorithms.dsgd(optax.sgd(0.1))).seconds(clocks.synchronous(0, 8))
    np.testing.assert_allclose(seconds, [0, 2 * (2 + 9) * BYTES])


def test_rounds_in_which_nobody_sends_wait_for_nobody():
    """The matrices I, W in turn are two local steps."""
    ring, still = topologies.ring(10), clocks.synchronous(latency=1.0, bandwidth=1e18)
    matrices = [np.eye(10), ring.weights().to_dense()]
    one = run(topologies.from_matrices(matrices), algorithms.dsgd(clique_averaging=False)).seconds(still)
    other = run(ring, algorithms.local_steps(algorithms.dsgd(clique_averaging=False), 2)).seconds(still)
    np.testing.assert_allclose(one, [0, 2], rtol=1e-9)
    np.testing.assert_allclose(one, other, rtol=1e-9)


def test_seeds_and_sweeps_have_seconds_and_files_keep_them(tmp_path):
    graphs = [topologies.ring(10), topologies.fully_connected(10)]

    def factory(rate):
        return algorithms.dsgd(optax.sgd(rate))

    result = run(graphs, factory, sweep={"rate": [0.1, 0.2]}, seeds=[0, 1])
    result.save(tmp_path / "run.npz")
    found = Result.load(tmp_path / "run.npz").seconds(clocks.LAN)
    assert found.shape == (2, 2, 2)
    np.testing.assert_array_equal(found[0], found[1])
    assert found[0, 0, -1] < found[0, 1, -1]
    np.testing.assert_array_equal(result.at(rate=0.2).seconds(clocks.LAN), found[1])


@pytest.mark.parametrize(("x", "label"), [("messages", "messages per node"), ("bytes", "bytes per node")])
def test_results_are_drawn_over_what_they_sent(x, label):
    result = run(topologies.ring(10), algorithms.dsgd())
    axes = result.plot(x=x)
    assert axes.get_xlabel() == label
    np.testing.assert_array_equal(axes.get_lines()[0].get_xdata(), getattr(result.history, x))


def test_results_are_drawn_over_seconds():
    result = run(topologies.ring(10), algorithms.dsgd())
    axes = plotting.plot_loss({"ring": result}, x="seconds", clock=clocks.LAN)
    np.testing.assert_array_equal(axes.get_lines()[0].get_xdata(), result.seconds(clocks.LAN))
    for wrong in ({"x": "seconds"}, {"clock": clocks.LAN}):
        with pytest.raises(ValueError, match="pass a clock"):
            result.plot(**wrong)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: clocks.synchronous(-1, 1e6), "latency=-1 must be a number of at least 0"),
        (lambda: clocks.synchronous(0, 0), "bandwidth=0: nothing would ever arrive"),
        (lambda: clocks.synchronous(0, 1, download=[1, 0]), "download=.*nothing would ever arrive"),
        (lambda: clocks.synchronous(0, 1, np.nan), "compute=nan"),
        (lambda: clocks.synchronous("1", 1), "latency='1'"),
        (
            lambda: run(topologies.ring(10), algorithms.dsgd()).seconds(clocks.synchronous([1, 2], 1)),
            "latency has shape",
        ),
        (lambda: run(topologies.ring(10), algorithms.dsgd()).seconds(3), "clock=3 is not a clock"),
        (lambda: topologies.ring(10).report(clock=clocks.LAN), "pass num_parameters"),
    ],
)
def test_impossible_clocks_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
