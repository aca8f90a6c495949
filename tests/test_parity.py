"""The compiled simulator equals the NumPy reference: every algorithm on every topology, each with every partition."""

import itertools
import math

import jax
import numpy as np
import optax
import pytest

import catalogue
import reference
from dcliques_jax import algorithms, mixing, models, simulate, topologies
from dcliques_jax._engine import sampling

ROUNDS, BATCH = 7, 6  # of 20 examples a node: an epoch is 6, 6, 6, 2, and seven rounds reach into a second one


def reference_batches(data, seed, rounds, batch_size, most=None):
    """The mini-batches that a run with this seed draws, as [rounds][nodes] (inputs, labels).

    `most` is the number of examples of the largest node of all runs that are simulated together.
    """
    key = jax.random.split(jax.random.key(seed, impl="threefry2x32"))[1]
    most = most or data.sizes.max()
    per_epoch = -(-most // batch_size)
    taken = []
    for number in range(rounds):
        epoch, turn = divmod(number, per_epoch)
        order = sampling.shuffle(key, epoch, data.indices.shape[1], data.sizes, np.arange(data.num_nodes))
        shuffled = np.take_along_axis(data.indices, np.asarray(order), axis=1)
        batch = []
        for node, size in enumerate(data.sizes):
            share = batch_size * size / most  # whole for the largest node
            first, last = (min(math.floor(share * count + 1e-9), size) for count in (turn, turn + 1))
            examples = shuffled[node, :size][first:last]
            batch.append((data.dataset.train_inputs[examples], data.dataset.train_labels[examples]))
        taken.append(batch)
    return taken


def reference_run(topology, data, name, start, rounds, batch_size, seed=0):
    method = catalogue.ALGORITHMS[name]
    stacked = {key: np.broadcast_to(value, (topology.num_nodes, *value.shape)) for key, value in start.items()}
    batches = reference_batches(data, seed, rounds, batch_size)
    return method.twin(stacked, batches, *method.matrices(topology), method.rate, method.momentum)


def start(dtype):
    rng = np.random.default_rng(5)
    return {
        "kernel": rng.normal(size=(6, catalogue.CLASSES)).astype(dtype),
        "bias": rng.normal(size=catalogue.CLASSES).astype(dtype),
    }


def check(topology_name, partition_name, algorithm_name, dtype, tolerance):
    data = catalogue.PARTITIONS[partition_name](catalogue.dataset(), catalogue.nodes_of(topology_name))
    topology = catalogue.TOPOLOGIES[topology_name](data.label_distribution)
    result = simulate(
        topology,
        data,
        model=models.logistic_regression(catalogue.CLASSES),
        algorithm=catalogue.ALGORITHMS[algorithm_name].make(topology),
        rounds=ROUNDS,
        eval_every=ROUNDS,
        batch_size=BATCH,
        init={"Dense_0": start(dtype)},
        progress=False,
    )
    params, losses = reference_run(topology, data, algorithm_name, start(np.float64), ROUNDS, BATCH)
    found = result.params["Dense_0"]
    assert found["kernel"].dtype == dtype
    close = {"rtol": tolerance, "atol": tolerance}
    for name in params:
        np.testing.assert_allclose(found[name], params[name], **close)
    accuracy, loss = reference.evaluate(params, data.dataset.test_inputs, data.dataset.test_labels)
    np.testing.assert_allclose(result.history.loss[-1], loss, **close)
    np.testing.assert_allclose(result.history.accuracy[-1], accuracy, atol=1e-6)
    np.testing.assert_allclose(result.history.consensus_distance[-1], reference.consensus_distance(params), **close)
    seen = np.array([[len(labels) for _, labels in batch] for batch in reference_batches(data, 0, ROUNDS, BATCH)])
    np.testing.assert_allclose(
        result.history.train_loss[-1], (np.array(losses) * seen).sum(axis=0) / seen.sum(axis=0), **close
    )


def pairs():
    """Every topology with every algorithm, each a compiled program. Every algorithm meets all partitions, in turn."""
    all_algorithms = [name for name, method in catalogue.ALGORITHMS.items() if method.twin is reference.dsgd]
    partitions = list(catalogue.PARTITIONS)
    # One class per node takes as many nodes as the others have.
    for number, topology in enumerate(t for t in catalogue.STATIC if catalogue.nodes_of(t) == catalogue.NODES):
        for turn in range(len(all_algorithms)):
            partition = partitions[(number + turn) % len(partitions)]
            yield topology, partition, all_algorithms[turn % len(all_algorithms)]


@pytest.mark.parametrize(("topology", "partition", "algorithm"), list(pairs()))
@pytest.mark.usefixtures("x64")
def test_equals_the_reference_in_float64(topology, partition, algorithm):
    check(topology, partition, algorithm, np.float64, 1e-10)


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("topology", "algorithm"),
    list(zip(catalogue.STATIC, itertools.cycle(["dsgd[momentum, clique averaging]", "dsgd[own matrices]"]))),
)
def test_equals_the_reference_in_float32(topology, algorithm):
    check(topology, "shards", algorithm, np.float32, 2e-5)


@pytest.mark.usefixtures("x64")
def test_unbiased_gradients_on_a_diverse_random_graph():
    """Gradients are averaged over the node and one neighbour of every other class, models over all edges."""
    topology = catalogue.TOPOLOGIES["diverse_random"](None)
    g = mixing.clique_average(topology).to_dense()
    np.testing.assert_allclose(g @ catalogue.ONE_CLASS, 1 / catalogue.CLASSES)  # every class counts the same
    np.testing.assert_allclose(g, reference.neighbourhood_average(topology.num_nodes, topology.gradient_edges))
    assert len(topology.gradient_edges) < len(topology.edges)
    data = catalogue.PARTITIONS["one_class"](catalogue.dataset(), catalogue.NODES)
    algorithm = algorithms.dsgd(optax.sgd(0.1), clique_averaging=True)
    arguments = {"rounds": ROUNDS, "batch_size": BATCH, "init": {"Dense_0": start(np.float64)}, "progress": False}
    result = simulate(topology, data, algorithm=algorithm, **arguments)
    stacked = {name: np.tile(value, (catalogue.NODES, *[1] * value.ndim)) for name, value in start(np.float64).items()}
    w = reference.metropolis_hastings(topology.num_nodes, topology.edges)
    params, _ = reference.dsgd(stacked, reference_batches(data, 0, ROUNDS, BATCH), w, g, 0.1)
    np.testing.assert_allclose(result.params["Dense_0"]["kernel"], params["kernel"], atol=1e-10)


@pytest.mark.parametrize("optimizer", ["adam", "clip", "lookup"])
@pytest.mark.usefixtures("x64")
def test_any_optimiser_runs_for_each_node_by_itself(optimizer):
    """A stacked optax optimiser equals one optimiser for each node in a loop."""
    transformation = {
        "adam": optax.adam(0.1),
        "clip": optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1)),
        "lookup": optax.sgd(optax.exponential_decay(0.1, 1, 0.5)),
    }[optimizer]
    topology = topologies.ring(4)
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(4, 3))}
    gradients = [{"w": rng.normal(size=(4, 3))} for _ in range(3)]
    algorithm = algorithms.dsgd(transformation)
    network = algorithm.network(topology)
    state, stacked = algorithm.init(params, network), params
    each = [{"w": row} for row in params["w"]]
    states = [transformation.init(node) for node in each]
    w = reference.metropolis_hastings(4, topology.edges)
    for gradient in gradients:
        stacked, state = algorithm.step(stacked, gradient, state, network, None)
        for i in range(4):
            updates, states[i] = transformation.update({"w": gradient["w"][i]}, states[i], each[i])
            each[i] = {"w": each[i]["w"] + updates["w"]}
        mixed = w @ np.stack([node["w"] for node in each])
        each = [{"w": row} for row in mixed]
    np.testing.assert_allclose(stacked["w"], np.stack([node["w"] for node in each]), rtol=1e-10)
