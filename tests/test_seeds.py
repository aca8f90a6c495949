"""Several runs at once are those runs, one by one."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dcliques_jax import algorithms, datasets, layers, mixing, partitions, prepare, simulate, topologies
from dcliques_jax._engine import memory, sampling, state
from dcliques_jax._mixing.sequences import to_common_form
from dcliques_jax.results import MEASURED

DATA = datasets.synthetic(num_train=400, num_test=60, num_classes=5, input_shape=(6,), seed=3)
SEEDS = [4, 0, 7]
PARTITIONS = [partitions.shards(DATA, 20, seed=seed) for seed in SEEDS]
GRAPHS = {
    "one ring": topologies.ring(20),
    "D-Cliques": [topologies.d_cliques(data.label_distribution, clique_size=5, seed=1) for data in PARTITIONS],
    "of uneven degrees": [topologies.ring(20), topologies.random_regular(20, 4), topologies.fully_connected(20)],
}
ARGUMENTS = {"epochs": 2, "init": "independent", "eval_nodes": 7, "eval_examples": 31, "progress": False}


def each(value):
    return value if isinstance(value, list) else [value] * len(SEEDS)


def assert_runs_equal_their_own(together, graphs, data, **arguments):
    for number, (graph, part, seed) in enumerate(zip(each(graphs), each(data), SEEDS, strict=True)):
        alone = simulate(graph, part, seed=seed, **ARGUMENTS | arguments)
        for name in MEASURED:
            found, expected = getattr(together.history, name)[number], getattr(alone.history, name)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=name)
        for found, expected in zip(jax.tree.leaves(together.params), jax.tree.leaves(alone.params), strict=True):
            np.testing.assert_allclose(found[number], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("graphs", GRAPHS)
def test_each_slice_equals_the_run_of_one_seed(graphs):
    algorithm = algorithms.dsgd(optax.sgd(0.1, momentum=0.9))
    together = simulate(GRAPHS[graphs], PARTITIONS, seeds=SEEDS, algorithm=algorithm, **ARGUMENTS)
    assert together.history.accuracy.shape == (3, 3, 7)
    assert together.provenance["seeds"] == SEEDS
    assert_runs_equal_their_own(together, GRAPHS[graphs], PARTITIONS, algorithm=algorithm)


@pytest.mark.optimised
def test_bits_are_equal_where_the_form_of_the_weights_is():
    together = simulate(GRAPHS["D-Cliques"], PARTITIONS, seeds=SEEDS, **ARGUMENTS)
    for number, seed in enumerate(SEEDS):
        alone = simulate(GRAPHS["D-Cliques"][number], PARTITIONS[number], seed=seed, **ARGUMENTS)
        jax.tree.map(lambda a, b, run=number: np.testing.assert_array_equal(a[run], b), together.params, alone.params)
        for name in ("accuracy", "loss", "consensus_distance"):
            np.testing.assert_array_equal(getattr(together.history, name)[number], getattr(alone.history, name))


def test_one_data_set_and_one_topology_serve_all_seeds():
    together = simulate(topologies.ring(20), DATA, seeds=SEEDS, **ARGUMENTS)
    assert_runs_equal_their_own(together, topologies.ring(20), DATA)
    assert together.topology.name == "ring"


def test_runs_that_do_not_fit_memory_together_run_by_turns(monkeypatch, tmp_path):
    whole = simulate(GRAPHS["D-Cliques"], PARTITIONS, seeds=SEEDS, **ARGUMENTS)
    needed, forecast = [], memory.forecast
    monkeypatch.setattr(memory, "forecast", lambda *args: needed.append(forecast(*args)) or needed[-1])
    monkeypatch.setattr(memory, "available", lambda mesh: 2 * 2 * needed[-1].total)  # twice what two runs take
    sizes = []
    original = state.start
    monkeypatch.setattr(state, "start", lambda layout, nets: sizes.append(len(layout.runs)) or original(layout, nets))
    parts = simulate(GRAPHS["D-Cliques"], PARTITIONS, seeds=SEEDS, **ARGUMENTS)
    assert sizes == [2, 1]
    stopped = simulate(
        GRAPHS["D-Cliques"], PARTITIONS, seeds=SEEDS, on_evaluation=lambda record: record.epoch == 1, **ARGUMENTS
    )
    assert stopped.history.accuracy.shape == (3, 2, 7)
    uneven = simulate(GRAPHS["of uneven degrees"], PARTITIONS, seeds=SEEDS, **ARGUMENTS)
    assert_runs_equal_their_own(uneven, GRAPHS["of uneven degrees"], PARTITIONS)
    arguments = ARGUMENTS | {"seeds": SEEDS, "checkpoint_dir": tmp_path}
    for _ in range(2):
        kept = simulate(GRAPHS["D-Cliques"], PARTITIONS, **arguments)
        jax.tree.map(np.testing.assert_array_equal, kept.params, whole.params)
    for name in MEASURED:
        found, expected = getattr(parts.history, name), getattr(whole.history, name)
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=name)
    jax.tree.map(np.testing.assert_array_equal, whole.state, parts.state)


class Small(nn.Module):
    """The layers of GN-LeNet, each once: it compiles in less time."""

    @nn.compact
    def __call__(self, x):
        x = layers.GroupNorm(num_groups=2)(layers.Conv(4, (3, 3), padding=1)(x))
        return layers.Dense(10)(nn.relu(layers.max_pool(x, (2, 2))).reshape(len(x), -1))


@pytest.mark.usefixtures("fused")
def test_networks_and_one_seed_alone():
    data = partitions.iid(datasets.synthetic(num_train=40, num_test=8, input_shape=(5, 5, 2)), 4)
    arguments = {"model": Small(), "rounds": 2, "progress": False}
    together = simulate(topologies.ring(4), data, seeds=[1, 2], **arguments)
    alone = simulate(topologies.ring(4), data, seeds=[2], **arguments)
    assert alone.history.loss.shape == (1, 3, 4)
    np.testing.assert_allclose(together.history.loss[1], alone.history.loss[0], rtol=1e-4)


def test_divergence_names_the_seed():
    huge = algorithms.dsgd(optax.sgd(1e38))
    with pytest.raises(FloatingPointError, match=r"at node \d+.* of seed 4"):
        simulate(topologies.ring(20), DATA, seeds=SEEDS, algorithm=huge, **ARGUMENTS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": []}, "must be a list of integers"),
        ({"seeds": 3}, "must be a list of integers"),
        ({"seeds": np.int64(3)}, "must be a list of integers"),
        ({"seeds": [0, 1], "seed": 5}, "pass either, not both"),
        ({"seeds": [0, -1]}, "seeds=-1 must be an integer"),
        ({"seeds": [0, 1], "topology": [topologies.ring(20)]}, "a list of 1 for 2 seeds"),
        ({"seeds": [0, 1], "dataset": PARTITIONS}, "a list of 3 for 2 seeds"),
        ({"seeds": [0, 1], "dataset": [PARTITIONS[0], partitions.iid(datasets.synthetic(), 20)]}, "same Dataset"),
    ],
)
def test_runs_that_do_not_fit_together_are_refused(arguments, message):
    arguments = {"topology": topologies.ring(20), "dataset": DATA, "progress": False} | arguments
    with pytest.raises(ValueError, match=message):
        simulate(**arguments)


def test_weights_become_alike():
    matrices = [mixing.metropolis_hastings(graph) for graph in GRAPHS["of uneven degrees"]]
    alike = to_common_form(matrices)
    assert {np.shape(weights.values) for weights in alike} == {(20, 19)}
    for weights, matrix in zip(alike, matrices, strict=True):
        np.testing.assert_allclose(weights.to_dense(), matrix.to_dense(), atol=1e-15)
    wide = [mixing.metropolis_hastings(g) for g in (topologies.fully_connected(70), topologies.ring(70))]
    assert {type(matrix) for matrix in to_common_form(wide)} == {mixing.Dense}


@pytest.mark.optimised
def test_seeds_may_differ_in_the_size_of_their_nodes():
    """Dirichlet partitions: each slice is the single run, where the largest node of all is its own."""
    seeds = [0, 1, 2]
    data = [partitions.dirichlet(DATA, 20, alpha=0.5, seed=seed) for seed in seeds]
    widths = [part.indices.shape[1] for part in data]
    assert len(set(widths)) > 1
    together = simulate(topologies.ring(20), data, seeds=seeds, epochs=2, batch_size=5, progress=False)
    assert together.provenance["rounds_per_epoch"] == -(-max(widths) // 5)
    largest = int(np.argmax(widths))
    alone = simulate(topologies.ring(20), data[largest], seed=seeds[largest], epochs=2, batch_size=5, progress=False)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[largest], b), together.params, alone.params)
    assert (together.history.loss[:, -1].mean(axis=1) < together.history.loss[:, 0].mean(axis=1)).all()


def test_the_order_of_examples_is_that_of_the_single_run():
    seeds, count = [0, 1], 40
    data = [partitions.dirichlet(DATA, 20, alpha=0.5, seed=seed) for seed in seeds]
    together = prepare(topologies.ring(20), data, seeds=seeds, batch_size=count)
    together.run(1)
    for number, (seed, part) in enumerate(zip(seeds, data, strict=True)):
        alone = prepare(topologies.ring(20), part, seed=seed, batch_size=min(count, part.sizes.max()))
        alone.run(1)
        orders = together._carry.order[number], alone._carry.order[0]
        for node, size in enumerate(part.sizes):
            np.testing.assert_array_equal(*(order[node, :size] for order in orders))


def test_the_order_of_long_lists_is_that_of_shorter_ones():
    """Positions in short lists take bits of what is sorted; in long lists nothing does."""
    key, epoch, nodes = jax.random.key(0, impl="threefry2x32"), jnp.int32(1), jnp.arange(3)
    for own in (8000, 8100, 9000):
        sizes = jnp.full(3, own)
        alone = sampling.shuffle(key, epoch, own, sizes, nodes)
        together = sampling.shuffle(key, epoch, 9500, sizes, nodes, jnp.int32(own))
        np.testing.assert_array_equal(together[:, :own], alone)


def test_seeds_of_other_numbers_of_nodes_are_refused():
    graphs, data = [topologies.ring(20), topologies.ring(10)], [partitions.iid(DATA, 20), partitions.iid(DATA, 10)]
    with pytest.raises(ValueError, match="is split over 10 nodes, that of seed 0 over 20: use as many nodes"):
        simulate(graphs, data, seeds=[0, 1], progress=False)
