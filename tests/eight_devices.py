"""Nodes on eight devices give what they give on one. Run by `test_devices.py` in a process that has eight."""

import re
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest

from dcliques_jax import (
    algorithms,
    compressors,
    datasets,
    faults,
    layers,
    metrics,
    mixing,
    models,
    partitions,
    prepare,
    simulate,
    topologies,
)
from dcliques_jax._engine import simulation
from dcliques_jax._mesh.transfer import AXIS

DATA = datasets.synthetic(num_train=2000, num_test=30, input_shape=(7,), seed=1)
SHARDS = partitions.shards(DATA, 100, seed=1)
P = SHARDS.label_distribution
MOMENTUM = algorithms.dsgd(optax.sgd(0.1, momentum=0.9))
UNEVEN = partitions.dirichlet(DATA, 37, alpha=0.5, seed=1)
TOPOLOGIES = {
    "fully connected cliques": (topologies.d_cliques(P), SHARDS),
    "small world": (topologies.d_cliques(P, inter="small_world"), SHARDS),
    "ring of cliques": (topologies.d_cliques(P, inter="ring"), SHARDS),
    "edges removed": (topologies.remove_intra_clique_edges(topologies.d_cliques(P), 3), SHARDS),
    "three cliques": (topologies.d_cliques(P, clique_size=40), SHARDS),
    "ring": (topologies.ring(37), UNEVEN),
    "random graph": (topologies.random_regular(100, 10), SHARDS),
    "fully connected": (topologies.fully_connected(37), UNEVEN),
}


@pytest.fixture(autouse=True)
def _few_rounds_at_a_time(monkeypatch):
    """For all tests: what some run and others read is compiled once."""
    monkeypatch.setattr(simulation, "_MOST_ROUNDS", 3)


def mesh(count=8):
    return jax.make_mesh((count,), (AXIS,), devices=jax.devices()[:count])


def run(topology, data, **arguments):
    arguments = {"epochs": 2, "init": "independent", "algorithm": MOMENTUM} | arguments
    return simulate(topology, data, progress=False, **arguments)


def assert_close(one, two, atol=2e-6):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol, rtol=atol), one.state, two.state)
    for name in ("loss", "train_loss", "consensus_distance"):
        a, b = getattr(one.history, name), getattr(two.history, name)
        np.testing.assert_allclose(a, b, atol=5 * atol, err_msg=name)
    # A logit or two may be rounded to the other side.
    for name in ("mean_model_accuracy", "nodes_right"):
        a, b = getattr(one.history, name), getattr(two.history, name)
        assert np.mean(a != b) < 0.02, name
    np.testing.assert_array_equal(one.history.round, two.history.round)
    np.testing.assert_array_equal(one.history.eval_nodes, two.history.eval_nodes)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_eight_devices_compute_what_one_does(name):
    alone = run(*TOPOLOGIES[name])
    assert_close(run(*TOPOLOGIES[name], mesh=mesh()), alone)
    if name == "small world":
        assert_close(run(*TOPOLOGIES[name], mesh=mesh(3)), alone)
        assert_close(run(*TOPOLOGIES[name], mesh=mesh(1)), alone)


@pytest.mark.usefixtures("x64")
def test_they_differ_by_rounding_only():
    arguments = TOPOLOGIES["small world"]
    start = {"Dense_0": {"kernel": np.zeros((7, 10)), "bias": np.zeros(10)}}
    assert_close(run(*arguments, mesh=mesh(), init=start), run(*arguments, init=start), atol=1e-14)


SOME = {"eval_nodes": 13, "eval_examples": 11}  # with seeds, programs of two tests


@pytest.mark.parametrize("more", [{"seeds": [4, 1]} | SOME, {"init": "shared"}])
def test_subsets_and_seeds_are_the_same(more):
    arguments = TOPOLOGIES["small world"]
    assert_close(run(*arguments, mesh=mesh(), **more), run(*arguments, **more))


def test_seeds_may_have_topologies_of_their_own():
    data = [partitions.shards(DATA, 100, seed=seed) for seed in (1, 2)]
    graphs = [
        topologies.d_cliques(d.label_distribution, inter="small_world", seed=s)
        for d, s in zip(data, (1, 2), strict=True)
    ]
    assert_close(run(graphs, data, seeds=[1, 2], mesh=mesh(), **SOME), run(graphs, data, seeds=[1, 2], **SOME))


def test_gradients_may_be_averaged_across_devices():
    data = partitions.one_class(DATA, 100, seed=1)
    diverse = topologies.diverse_random(data.label_distribution)
    averaging = algorithms.dsgd(optax.sgd(0.1), clique_averaging=True)
    assert_close(run(diverse, data, algorithm=averaging, mesh=mesh()), run(diverse, data, algorithm=averaging))


class Small(nn.Module):
    """The layers of GN-LeNet, each once: it compiles in less time."""

    @nn.compact
    def __call__(self, x):
        x = layers.GroupNorm(num_groups=2)(layers.Conv(4, (3, 3), padding=1)(x))
        return layers.Dense(10)(nn.relu(layers.max_pool(x, (2, 2))).reshape(len(x), -1))


class Both(nn.Module):
    """Statistics of batches and random masks."""

    @nn.compact
    def __call__(self, inputs, train: bool = False):
        x = nn.relu(layers.BatchNorm(use_running_average=not train)(layers.Dense(8)(inputs)))
        return layers.Dense(10)(nn.Dropout(0.5, deterministic=not train)(x))


@pytest.mark.parametrize("way", ["full_batches", "with_replacement"])
def test_masks_statistics_and_augmented_inputs_are_the_same(way):
    """Also with lost messages, tests per node, gossiped statistics and a calibrated mean model."""
    data = partitions.shards(DATA, 100, seed=1).sampled(way).with_local_tests()
    topology = topologies.d_cliques(data.label_distribution, inter="small_world", seed=1)
    model = models.with_statistics(Both(), gossip=way == "full_batches", calibration_batches=3)
    arguments = {"model": model, "faults": faults.message_loss(0.2), "batch_size": 5, "init": "shared"}
    arguments["augment"] = lambda key, inputs: inputs + 0.1 * jax.random.normal(key, inputs.shape)
    alone, shared = run(topology, data, **arguments), run(topology, data, mesh=mesh(), **arguments)
    assert_close(shared, alone, atol=2e-4)  # norms of five examples enlarge what is rounded
    np.testing.assert_allclose(shared.history.local_accuracy, alone.history.local_accuracy, atol=0.11)


@pytest.mark.usefixtures("fused")
def test_networks_are_shared_out_too():
    images = datasets.synthetic(num_train=200, num_test=4, input_shape=(5, 5, 2))
    data = partitions.shards(images, 20)
    topology = topologies.d_cliques(data.label_distribution, clique_size=5)
    arguments = {"model": Small(), "epochs": None, "rounds": 1, "batch_size": 2, "init": "shared"}
    assert_close(run(topology, data, mesh=mesh(), **arguments), run(topology, data, **arguments), atol=1e-5)


# What devices tell each other


def collectives(topology, data, count=8, **arguments):
    """Operations of the compiled rounds that move something between devices: (kind, bytes of all devices)."""
    arguments = {"algorithm": MOMENTUM} | arguments
    rounds = prepare(topology, data, mesh=mesh(count), **arguments)
    rounds.begin()
    text = rounds._program.as_text()
    kinds = "all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter|collective-broadcast"
    found = []
    for shape, kind in re.findall(rf"= (\([^)]*\)|\S+) ({kinds})(?:-start)?\(", text):
        sizes = [
            np.prod([int(n) for n in dims.split(",") if n] or [1]) for dims in re.findall(r"\w+\[([\d,]*)\]", shape)
        ]
        found.append((kind, 4 * count * int(sum(sizes))))
    return found


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_only_boundary_rows_move_and_as_many_as_the_report_says(name):
    topology, data = TOPOLOGIES[name]
    found = collectives(topology, data)
    parameters = 10 * 7 + 10
    report = topology.report(num_parameters=parameters, num_devices=8)
    kind = "all-reduce" if name == "fully connected" else "collective-permute"
    assert sum(size for k, size in found if k == kind) == report.bytes_between_devices
    everything = 4 * parameters * data.num_nodes
    others = [size for k, size in found if k != kind]
    # Losses and batch sizes of three rounds, for every process to read: no models.
    assert sum(others) <= 2 * 4 * 3 * 8 * 8 * (data.num_nodes + 8)
    assert all(size < everything for k, size in found if k == "all-gather") or everything < 4 * 3 * 8 * 100
    if name in ("ring of cliques", "ring"):
        assert 8 <= report.cut_edges <= 16


def test_clique_averaging_needs_no_message():
    topology, data = TOPOLOGIES["fully connected cliques"]
    plain = algorithms.dsgd(optax.sgd(0.1), clique_averaging=False)
    averaging = algorithms.dsgd(optax.sgd(0.1), clique_averaging=True)
    assert collectives(topology, data, algorithm=averaging) == collectives(topology, data, algorithm=plain)


def test_two_nodes_are_enough_for_two_devices():
    data = partitions.iid(DATA, 2)
    assert_close(run(topologies.ring(2), data, mesh=mesh(2)), run(topologies.ring(2), data))


# Checkpoints


class StopError(Exception):
    """Stands for whatever ends a process."""


@pytest.mark.parametrize("counts", [(8, 3), (8, None), (None, 8)])
def test_a_run_goes_on_with_another_number_of_devices(counts, tmp_path):
    first, then = (None if count is None else mesh(count) for count in counts)
    arguments = {"epochs": None, "rounds": 7, "eval_every": 3, "checkpoint_dir": tmp_path}  # epochs have four rounds
    topology, data = TOPOLOGIES["small world"]

    def stop(record):
        if record.round == 3:
            raise StopError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcliques_jax._store.checkpoints._SPACING", 0)
        with pytest.raises(StopError):
            run(topology, data, mesh=first, on_evaluation=stop, **arguments)
    resumed = run(topology, data, mesh=then, **arguments)
    assert resumed.history.round.tolist() == [0, 3, 6, 7]
    assert_close(resumed, run(topology, data, **arguments | {"checkpoint_dir": None}))


# Errors


def test_what_devices_cannot_share_is_refused():
    star = topologies.from_edges(100, [(0, i) for i in range(1, 100)])
    with pytest.raises(ValueError, match="Dense weights multiply all models"):
        run(star, SHARDS, mesh=mesh())
    for wrong in (jax.make_mesh((8,), ("x",)), jax.make_mesh((4, 2), ("nodes", "x")), 8):
        with pytest.raises(ValueError, match="must have one axis named 'nodes'"):
            run(*TOPOLOGIES["small world"], mesh=wrong)


class Watched(NamedTuple):
    own: Any
    largest: jax.Array  # of all nodes
    rounds: jax.Array


def watching(see):
    def init(params, network):
        return Watched(MOMENTUM.init(params, network), jnp.zeros(()), jnp.zeros((), jnp.int32))

    def step(params, gradients, state, network, round):
        params, own = MOMENTUM.step(params, gradients, state.own, network, round)
        return see(params, Watched(own, state.largest, state.rounds + 1))

    return MOMENTUM._replace(init=init, step=step)


def test_nodes_that_see_each_other_without_weights_are_refused():
    def largest(params, state):
        return params, state._replace(largest=jax.tree.leaves(params)[0].max())

    def centred(params, state):
        return jax.tree.map(lambda leaf: leaf - leaf.mean(axis=0, keepdims=True), params), state

    for see in (largest, centred):
        with pytest.raises(ValueError, match="lets nodes see each other without Weights"):
            run(*TOPOLOGIES["small world"], mesh=mesh(), algorithm=watching(see))


# Own algorithms


def test_scalars_in_a_state_are_the_same_on_all_devices():
    counting = watching(lambda *both: both)
    alone, shared = (run(*TOPOLOGIES["small world"], algorithm=counting, mesh=m) for m in (None, mesh()))
    assert_close(shared, alone)
    assert int(shared.state.algorithm.rounds) == int(alone.state.algorithm.rounds) == 8


def gradient_tracking(rate):
    """theta <- W (theta - rate y), y <- W y + g - (the last g)."""

    def init(params, network):
        return {name: jax.tree.map(jnp.zeros_like, params) for name in ("tracker", "last")}

    def step(params, gradients, state, network, round):
        tracker = mixing.mix(network.gossip, state["tracker"])
        tracker = jax.tree.map(lambda y, g, last: y + g - last, tracker, gradients, state["last"])
        params = mixing.mix(network.gossip, jax.tree.map(lambda p, y: p - rate * y, params, tracker))
        return params, {"tracker": tracker, "last": gradients}

    return algorithms.Algorithm(algorithms.over_topology(clique_averaging=False), init, step)


def test_every_algorithm_runs_on_a_mesh_with_seeds_and_resumes(tmp_path):
    topology, data = TOPOLOGIES["small world"]
    tracking = gradient_tracking(0.1)
    alone = run(topology, data, algorithm=tracking, seeds=[3, 1])
    arguments = {"algorithm": tracking, "seeds": [3, 1], "mesh": mesh()}
    assert_close(run(topology, data, **arguments), alone)
    arguments["checkpoint_dir"] = tmp_path
    run(topology, data, on_evaluation=lambda record: record.epoch == 1, **arguments)
    assert_close(run(topology, data, **arguments), alone)


def test_draws_by_node_are_the_same_on_eight_devices():
    def init(params, network):
        return jnp.zeros(len(jax.tree.leaves(params)[0]))

    noisy = algorithms.dsgd()._replace(
        init=init, step=lambda p, g, s, network, round: (p, jax.vmap(jax.random.uniform)(round.node_keys()))
    )
    # Nodes in another order, and empty places.
    three = TOPOLOGIES["three cliques"]
    alone, shared = (run(*three, algorithm=noisy, mesh=m).state.algorithm for m in (None, mesh()))
    np.testing.assert_array_equal(alone, shared)
    assert len(np.unique(alone)) == len(alone)


def digraph():
    arcs = [(j, (j + step) % 37) for j in range(37) for step in (1, 3) if step == 1 or j % 2 == 0]
    graph = nx.DiGraph()
    graph.add_nodes_from(range(37))
    graph.add_edges_from(arcs)
    return topologies.from_networkx(graph)


PLAIN = algorithms.dsgd(optax.sgd(0.1))
RIVALS = {
    "tracking": (algorithms.gradient_tracking(optax.adam(0.01)), TOPOLOGIES["small world"]),
    "D2": (algorithms.d2(), TOPOLOGIES["ring of cliques"]),
    "D2 of one mean": (algorithms.d2(), TOPOLOGIES["fully connected"]),
    "lazy D2": (algorithms.d2(lazy=True), TOPOLOGIES["fully connected"]),
    "gossiped momentum": (algorithms.gossip_momentum(0.05), TOPOLOGIES["fully connected"]),
    "quasi-global momentum": (algorithms.quasi_global_momentum(0.05), TOPOLOGIES["ring"]),
    "push-sum": (algorithms.push_sum(), (digraph(), UNEVEN)),
    "CHOCO": (algorithms.choco(optax.sgd(0.1), compressors.random_k(0.3), 0.5), TOPOLOGIES["small world"]),
    "quantised CHOCO": (algorithms.choco(optax.sgd(0.1), compressors.quantise(15), 0.5), TOPOLOGIES["ring"]),
    "local steps": (algorithms.local_steps(PLAIN, 3), TOPOLOGIES["small world"]),
    "repeated gossip": (algorithms.repeated_gossip(PLAIN, 2), TOPOLOGIES["ring of cliques"]),
    "Chebyshev": (algorithms.repeated_gossip(PLAIN, 3, chebyshev=True), TOPOLOGIES["ring"]),
    "SAM": (algorithms.sam(algorithms.gradient_tracking(), 0.1), TOPOLOGIES["ring"]),
}


@pytest.mark.parametrize("name", RIVALS)
def test_rivals_are_the_same_on_eight_devices(name):
    algorithm, where = RIVALS[name]
    one, other = (run(*where, algorithm=algorithm, mesh=m) for m in (mesh(), None))
    assert_close(one, other)
    for measure in ("messages", "bytes"):
        np.testing.assert_array_equal(getattr(one.history, measure), getattr(other.history, measure), err_msg=measure)


# Faults and moving graphs


FAULTS = {
    "links and nodes": [faults.churn(0.1, 0.4), faults.message_loss(0.2), faults.bursts(0.1, 3)],
    "directed": faults.message_loss(0.3, directed=True),
    "nodes": [faults.participation(0.6), faults.stragglers(0.1)],
}


def assert_same_faults(one, other):
    for name in ("messages", "messages_lost", "nodes_online"):
        np.testing.assert_array_equal(getattr(one.history, name), getattr(other.history, name), err_msg=name)
    assert_close(one, other)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("fully connected cliques", "links and nodes"),
        ("small world", "directed"),
        ("three cliques", "nodes"),
        ("fully connected", "nodes"),
    ],
)
def test_eight_devices_throw_the_same_coins(name, given):
    assert_same_faults(*(run(*TOPOLOGIES[name], faults=FAULTS[given], mesh=m) for m in (mesh(), None)))


def test_sequences_run_on_eight_devices(tmp_path):
    rings = [topologies.sequence([topologies.ring(37, seed=turn + seed) for turn in range(3)]) for seed in (0, 5)]
    given = {"faults": FAULTS["links and nodes"], "seeds": [1, 2]}
    alone = run(rings, UNEVEN, **given)
    assert_same_faults(run(rings, UNEVEN, mesh=mesh(), **given), alone)
    with pytest.MonkeyPatch.context() as patch:  # the run goes on with another number of devices
        patch.setattr("dcliques_jax._store.checkpoints._SPACING", 0)
        arguments = given | {"checkpoint_dir": tmp_path}
        run(rings, UNEVEN, mesh=mesh(), on_evaluation=lambda record: record.epoch == 1, **arguments)
        assert_same_faults(run(rings, UNEVEN, **arguments), alone)


@pytest.mark.parametrize("paced", [algorithms.local_steps(PLAIN, 2), algorithms.repeated_gossip(PLAIN, 2)])
def test_faults_at_another_pace_are_the_same_on_eight_devices(paced):
    rings = topologies.sequence([topologies.ring(37, seed=turn) for turn in range(3)])
    given = {"faults": FAULTS["links and nodes"], "algorithm": paced}
    assert_same_faults(*(run(rings, UNEVEN, mesh=m, **given) for m in (mesh(), None)))


def test_directed_matrices_run_on_eight_devices():
    own = np.eye(37)
    matrices = [(own + np.roll(own, shift, axis=1)) / 2 for shift in (1, 2, 4)]
    for given in (matrices[0], matrices):
        topology = topologies.from_matrices(given)
        assert_close(*(run(topology, UNEVEN, mesh=m) for m in (mesh(), None)))


def test_push_sum_over_a_sequence_is_refused_on_a_mesh():
    own = np.eye(37)
    peers = topologies.from_matrices([(own + np.roll(own, shift, axis=1)) / 2 for shift in (1, 2, 4)])
    with pytest.raises(ValueError, match=r"push-sum over matrices that change .* needs one device: omit mesh"):
        run(peers, UNEVEN, algorithm=algorithms.push_sum(), mesh=mesh())


def test_drawn_graphs_are_refused_on_a_mesh():
    drawn = topologies.from_matrices(topologies.ring(37).weights().to_dense(), drawn=True)
    with pytest.raises(ValueError, match="drawn in every round need all nodes on one device"):
        run(drawn, UNEVEN, mesh=mesh())


def test_metrics_are_the_same_on_eight_devices():
    def norm(params, inputs, labels):
        return sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(params)) + inputs.mean()

    measured = {
        "norm": norm,
        "of the mean model": metrics.of_mean_model(norm),
        "whole": metrics.whole(lambda params, inputs, labels: labels.max() + 0 * params["Dense_0"]["bias"]),
    }
    for more in ({}, {"eval_nodes": 13}):
        one, other = (
            run(*TOPOLOGIES["small world"], metrics=measured, mesh=m, **more).history.extra for m in (None, mesh())
        )
        for name in measured:
            np.testing.assert_allclose(one[name], other[name], rtol=1e-5, err_msg=name)
