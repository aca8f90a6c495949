"""Rival algorithms: known figures, invariants, parity with the reference, traffic, and what is refused."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
import pytest

import catalogue
import monitoring
import quadratic
import reference
from dcliques_jax import (
    algorithms,
    compressors,
    datasets,
    faults,
    mixing,
    models,
    partitions,
    simulate,
    topologies,
)
from dcliques_jax._mixing.growth import d2_growth
from dcliques_jax.algorithms import Round
from test_catalogue import public_functions
from test_faults import TOPOLOGIES
from test_parity import BATCH, ROUNDS, reference_batches, start

NODES = catalogue.NODES
SGD, SLOW = optax.sgd(0.05), optax.sgd(0.005, momentum=0.9)
IDENTITY = compressors.Compressor(lambda key, x: x, lambda d: 4 * d)


# Known figures: the mean squared distance from the optimum after 10, 100 and 1000 rounds


def ahead(*offsets):
    """Equal weights on a node and on those that are some offsets ahead, in the order of nodes."""
    own = np.eye(16)
    return sum((np.roll(own, offset, axis=1) for offset in offsets), start=own) / (len(offsets) + 1)


def one_peer():
    return topologies.from_matrices([ahead(2**turn) for turn in range(4)])


def groups(*strides, size):
    """Nodes whose numbers agree in all digits but one average, in turn."""
    matrices = []
    for stride in strides:
        group = [(i // (stride * size), i % stride) for i in range(16)]
        matrices.append(np.array([[float(a == b) / size for b in group] for a in group]))
    return topologies.from_matrices(matrices)


def undirected(graph):
    return topologies.from_networkx(nx.convert_node_labels_to_integers(graph, ordering="sorted"))


GOLDEN = {
    "fully connected": (
        algorithms.dsgd(SGD),
        lambda: topologies.fully_connected(16),
        (1.317917e-1, 1.464601e-4, 1.7e-27),
    ),
    "dsgd": (algorithms.dsgd(SGD), quadratic.ring, (1.973647e-1, 1.075575e-1, 1.063242e-1)),
    "local steps": (
        algorithms.local_steps(algorithms.dsgd(SGD), 5),
        quadratic.ring,
        (2.808408e-1, 4.160622e-1, 4.318185e-1),
    ),
    "three gossips": (
        algorithms.repeated_gossip(algorithms.dsgd(SGD), 3),
        quadratic.ring,
        (1.554270e-1, 2.438786e-2, 2.391916e-2),
    ),
    "Chebyshev": (
        algorithms.repeated_gossip(algorithms.dsgd(SGD), 3, chebyshev=True),
        quadratic.ring,
        (1.436326e-1, 9.518713e-3, 9.083439e-3),
    ),
    "local momentum": (algorithms.dsgd(SLOW), quadratic.ring, (2.609289e-1, 1.071630e-1, 1.063242e-1)),
    "gossiped momentum": (
        algorithms.gossip_momentum(0.005, 0.9),
        quadratic.ring,
        (2.542307e-1, 6.449542e-2, 6.403884e-2),
    ),
    "quasi-global momentum": (
        algorithms.quasi_global_momentum(0.005, 0.9),
        quadratic.ring,
        (3.363619e-1, 2.954687e-2, 3.674440e-3),
    ),
    "quasi-global Nesterov": (
        algorithms.quasi_global_momentum(0.005, 0.9, nesterov=True),
        quadratic.ring,
        (2.997427e-1, 2.658016e-2, 1.105847e-2),
    ),
    "tracking": (algorithms.gradient_tracking(SGD), quadratic.ring, (1.657301e-1, 2.358808e-3, 3.1e-16)),
    "tracking, momentum": (algorithms.gradient_tracking(SLOW), quadratic.ring, (2.526540e-1, 2.733240e-3, 3.5e-15)),
    "tracking, one peer": (algorithms.gradient_tracking(SGD), one_peer, (1.319668e-1, 1.455011e-4, 1e-27)),
    "D2": (algorithms.d2(SGD, lazy=False), quadratic.ring, (1.397853e-1, 1.435487e-4, 9.5e-20)),
    "D2, lazy": (algorithms.d2(SGD, lazy=True), quadratic.ring, (1.600227e-1, 1.408569e-4, 6.9e-24)),
    "D2, lazy, momentum": (algorithms.d2(SLOW, lazy=True), quadratic.ring, (2.532187e-1, 9.554785e-5, 6.4e-19)),
    # Only the figure after 100 rounds is known on these two, which need (I + W) / 2.
    "D2, torus": (
        algorithms.d2(SGD),
        lambda: undirected(nx.grid_2d_graph(4, 4, periodic=True)),
        (None, 1.448147e-4, None),
    ),
    "D2, hypercube": (algorithms.d2(SGD), lambda: undirected(nx.hypercube_graph(4)), (None, 1.452558e-4, None)),
    "push-sum": (algorithms.push_sum(SGD), quadratic.digraph, (1.678395e-1, 1.954693e-2, 1.918092e-2)),
    "CHOCO": (
        algorithms.choco(SGD, compressors.top_k(0.4), 1.0),
        quadratic.ring,
        (1.987047e-1, 1.075559e-1, 1.063242e-1),
    ),
    "CHOCO, small steps": (
        algorithms.choco(SGD, compressors.top_k(0.4), 0.3),
        quadratic.ring,
        (3.058449e-1, 3.740384e-1, 3.785902e-1),
    ),
    "exponential": (
        algorithms.dsgd(SGD),
        lambda: topologies.from_matrices(ahead(1, 2, 4, 8)),
        (1.396265e-1, 4.858835e-3, 4.523100e-3),
    ),
    "one peer": (algorithms.dsgd(SGD), one_peer, (1.530439e-1, 1.754304e-2, 1.682917e-2)),
    "Base-2": (algorithms.dsgd(SGD), lambda: groups(1, 2, 4, 8, size=2), (1.574569e-1, 1.722767e-2, 1.665976e-2)),
    "Base-4": (algorithms.dsgd(SGD), lambda: groups(1, 4, size=4), (1.377591e-1, 2.562877e-3, 2.317111e-3)),
}


@functools.cache
def golden(name):
    """Models after 10, 100 and 1000 rounds in float64, and the result; several tests read them."""
    algorithm, topology, _ = GOLDEN[name]
    return quadratic.run(algorithm, topology())


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.usefixtures("x64")
def test_known_figures(name):
    for found, known in zip(quadratic.errors(golden(name)[0]), GOLDEN[name][2], strict=True):
        if known is None:
            continue
        if known > 1e-12:
            assert found == pytest.approx(known, rel=1e-6)
        else:  # roundings differ
            assert abs(math.log10(found / known)) < 1


@pytest.mark.parametrize("name", GOLDEN)
def test_known_figures_in_float32(name):
    algorithm, topology, known = GOLDEN[name]
    found = quadratic.errors(quadratic.run(algorithm, topology(), dtype=np.float32, rounds=(10, 100))[0])
    for value, figure in zip(found, known[:2], strict=True):
        assert figure is None or value == pytest.approx(figure, rel=1e-3)


@pytest.mark.parametrize("form", [mixing.GroupMean, mixing.Dense, mixing.Neighbours])
def test_rounding_does_not_move_the_end_of_d2(form):
    """Errors of gossip that are added up must have a mean of 0 to the last bit of the errors, not of the models."""
    topology = topologies.fully_connected(quadratic.NODES)
    weights = topology.weights() if form is mixing.GroupMean else form.from_sparse(topology.weights().to_sparse())
    algorithm = algorithms.d2(optax.sgd(0.005), weights=weights)
    models, _ = quadratic.run(algorithm, topology, dtype=np.float32, rounds=(10_000, 30_000))
    assert quadratic.errors(models).max() < 1e-7


@pytest.mark.usefixtures("x64")
def test_tracked_gradients_make_adam_unbiased():
    """Adam scales the gradients of each node, which biases it even on a fully connected network."""
    adam = optax.adam(0.01)
    tracked, _ = quadratic.run(algorithms.gradient_tracking(adam), rounds=(100, 1000))
    local, _ = quadratic.run(algorithms.dsgd(adam), topologies.fully_connected(16), rounds=(100, 1000))
    np.testing.assert_allclose(quadratic.errors(tracked), [2.5e-3, 1.0e-8], rtol=0.05)
    np.testing.assert_allclose(quadratic.errors(local), [1.46e-1, 6.8e-2], rtol=0.01)


# Fixed points


def end_of_dsgd(w, rate):
    """Solves X = W (X - rate (H X - c)) over all nodes at once."""
    n, d = quadratic.NODES, quadratic.SIZE
    curvature = np.zeros((n * d, n * d))
    for i in range(n):
        curvature[i * d : (i + 1) * d, i * d : (i + 1) * d] = quadratic.HESSIANS[i]
    mixing_all = np.kron(w, np.eye(d))
    left = np.eye(n * d) - mixing_all @ (np.eye(n * d) - rate * curvature)
    return np.linalg.solve(left, rate * mixing_all @ quadratic.LINEAR.ravel()).reshape(n, d)


def slowed(step_size):
    return np.eye(16) + step_size * (quadratic.RING - np.eye(16))


@pytest.mark.parametrize(
    ("name", "w", "rate"),
    [
        ("dsgd", quadratic.RING, 0.05),
        ("local momentum", quadratic.RING, 0.05),  # 0.005 / (1 - 0.9)
        ("three gossips", np.linalg.matrix_power(quadratic.RING, 3), 0.05),
        ("CHOCO", quadratic.RING, 0.05),
        ("CHOCO, small steps", slowed(0.3), 0.05),
        ("exponential", ahead(1, 2, 4, 8), 0.05),
    ],
)
@pytest.mark.usefixtures("x64")
def test_where_models_end(name, w, rate):
    np.testing.assert_allclose(golden(name)[0][-1], end_of_dsgd(w, rate), atol=1e-8)


@pytest.mark.parametrize(("nesterov", "factor"), [(False, 1.0), (True, 1.9)])
@pytest.mark.usefixtures("x64")
def test_quasi_global_momentum_ends_where_dsgd_does(nesterov, factor):
    """At the same rate, not at rate / (1 - b); Nesterov steps are 1 + b times as long."""
    algorithm = algorithms.quasi_global_momentum(0.02, 0.9, nesterov)
    found, _ = quadratic.run(algorithm, rounds=(3000,))
    np.testing.assert_allclose(found[0], end_of_dsgd(quadratic.RING, 0.02 * factor), atol=1e-8)


def test_the_known_ends_of_dsgd():
    assert quadratic.errors(end_of_dsgd(quadratic.RING, 0.05)) == pytest.approx(1.0632416634e-1, rel=1e-9)
    assert quadratic.errors(end_of_dsgd(slowed(0.3), 0.05)) == pytest.approx(3.785902218e-1, rel=1e-9)
    assert quadratic.errors(end_of_dsgd(quadratic.RING, 0.005)) == pytest.approx(3.677746e-3, rel=1e-6)


# Invariants


def rounds_of(algorithm, topology, count, params=None, gradient=quadratic.gradients):
    """Rounds outside of any program: network, models before, models and state after each."""
    network = algorithm.network(topology)
    nodes = jnp.arange(topology.num_nodes, dtype=jnp.int32)
    params = jnp.zeros((topology.num_nodes, quadratic.SIZE)) if params is None else jnp.asarray(params)
    state = algorithm.init(params, network)
    for number in range(count):
        key = jax.random.fold_in(jax.random.key(0, impl="threefry2x32"), number)
        round = Round(jnp.int32(number), key, nodes, gradient)
        before = params
        params, state = algorithm.step(params, jnp.asarray(gradient(before)), state, network.at(round), round)
        yield np.asarray(before), np.asarray(params), state


@pytest.mark.parametrize("topology", [quadratic.ring, one_peer, lambda: topologies.random_matchings(16, seed=2)])
@pytest.mark.usefixtures("x64")
def test_the_mean_of_what_is_tracked_is_the_mean_gradient(topology):
    for before, _, (_, tracked, last) in rounds_of(algorithms.gradient_tracking(SGD), topology(), 6):
        gradients = quadratic.gradients(before)
        np.testing.assert_array_equal(last, gradients)
        np.testing.assert_allclose(tracked.mean(axis=0), gradients.mean(axis=0), atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_the_tracker_stays_exact_for_a_thousand_rounds():
    for name in ("tracking", "tracking, one peer", "tracking, momentum"):
        _, tracked, last = golden(name)[1].state.algorithm
        np.testing.assert_allclose(tracked.sum(axis=0), last.sum(axis=0), atol=1e-12)


@pytest.mark.parametrize(
    "topology",
    [
        quadratic.digraph,
        one_peer,
        quadratic.ring,
        lambda: undirected(nx.star_graph(15)),
    ],
)
@pytest.mark.usefixtures("x64")
def test_push_sum_keeps_all_mass(topology):
    start_at = np.random.default_rng(3).normal(size=(16, 5))
    still = algorithms.push_sum(optax.sgd(0.0))
    weights = np.ones((16, 1))
    for before, after, (_, weight) in rounds_of(still, topology(), 40, start_at):
        assert weight.sum() == pytest.approx(16, abs=1e-12)
        np.testing.assert_allclose((weights * before).sum(axis=0), start_at.sum(axis=0), atol=1e-12)
        weights, last = np.asarray(weight)[:, None], after
    assert np.abs(last - start_at.mean(axis=0)).max() < np.abs(start_at - start_at.mean(axis=0)).max() / 10


@pytest.mark.usefixtures("x64")
def test_the_weights_of_push_sum():
    weight = golden("push-sum")[1].state.algorithm[1]
    assert weight.sum() == pytest.approx(16, abs=1e-12)
    assert (weight.min(), weight.max()) == (pytest.approx(0.857143, abs=1e-6), pytest.approx(1.142857, abs=1e-6))


@pytest.mark.usefixtures("x64")
def test_push_sum_over_rows_that_sum_to_1_is_dsgd():
    for topology in (one_peer(), topologies.from_matrices(ahead(1, 2, 4, 8))):
        push, plain = (rounds_of(algorithm(SGD), topology, 5) for algorithm in (algorithms.push_sum, algorithms.dsgd))
        for (_, one, (_, weight)), (_, other, _) in zip(push, plain, strict=True):
            np.testing.assert_allclose(weight, 1, atol=1e-14)
            np.testing.assert_allclose(one, other, atol=1e-14)


@pytest.mark.usefixtures("x64")
def test_choco_without_compression_is_dsgd():
    found, _ = quadratic.run(algorithms.choco(SGD, IDENTITY, 1.0))
    np.testing.assert_allclose(found, golden("dsgd")[0], atol=1e-12)


def test_one_local_step_and_one_gossip_are_the_plain_algorithm():
    """The very same functions, so the same bits."""
    for plain in (algorithms.dsgd(), algorithms.gradient_tracking(), algorithms.choco(SGD, compressors.top_k(0.5), 1)):
        assert algorithms.local_steps(plain, 1) is plain
        assert algorithms.repeated_gossip(plain, 1) is plain
        assert algorithms.repeated_gossip(plain, 1, chebyshev=True) is plain


@pytest.mark.parametrize(
    ("wrapped", "by_hand"),
    [
        (lambda a: algorithms.local_steps(a, 3), lambda a, b, c: [m for w in (a, b, c) for m in (None, None, w)]),
        (lambda a: algorithms.repeated_gossip(a, 2), lambda a, b, c: [b @ a, a @ c, c @ b]),
        (
            lambda a: algorithms.local_steps(algorithms.repeated_gossip(a, 2), 2),
            lambda a, b, c: [None, b @ a, None, a @ c, None, c @ b],
        ),
    ],
)
@pytest.mark.usefixtures("x64")
def test_a_sequence_advances_once_per_gossip(wrapped, by_hand):
    matrices = [quadratic.RING, ahead(3), ahead(5, 6)]
    expanded = [np.eye(16) if matrix is None else matrix for matrix in by_hand(*matrices)]
    times = (4, 11)
    found, _ = quadratic.run(wrapped(algorithms.dsgd(SGD)), topologies.from_matrices(matrices), rounds=times)
    expected, _ = quadratic.run(algorithms.dsgd(SGD), topologies.from_matrices(expanded), rounds=times)
    np.testing.assert_allclose(found, expected, atol=1e-13)


@pytest.mark.parametrize(("times", "known"), [(2, 0.81997), (3, 0.65961), (4, 0.50642), (5, 0.37817)])
@pytest.mark.usefixtures("x64")
def test_the_contraction_of_chebyshev_gossip(times, known):
    algorithm = algorithms.repeated_gossip(algorithms.dsgd(), times, chebyshev=True)
    round = Round(jnp.int32(0), jax.random.key(0), jnp.arange(16), quadratic.gradients)
    matrix = np.asarray(algorithm.network(quadratic.ring()).at(round).gossip.apply(jnp.eye(16)))
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-12)
    eigenvalues = np.sort(np.abs(np.linalg.eigvalsh(matrix)))
    assert eigenvalues[-1] == pytest.approx(1)
    assert eigenvalues[-2] == pytest.approx(known, abs=1e-5)
    assert eigenvalues[-2] == pytest.approx(1 / np.cosh(times * np.arccosh(1 / 0.949253)), abs=1e-5)


@pytest.mark.usefixtures("x64")
def test_sam_takes_gradients_where_the_loss_is_worst():
    """A step of length radius along the gradient of each node, and no step if that is 0."""
    at = np.random.default_rng(0).normal(size=(16, 5))
    flat = np.linalg.solve(quadratic.HESSIANS[3], quadratic.LINEAR[3])
    at[3] = flat
    slopes = np.array(quadratic.gradients(at))
    slopes[3] = 0
    norms = np.linalg.norm(slopes, axis=1, keepdims=True)
    worst = at + 0.1 * slopes / np.where(norms > 0, norms, 1)

    def gradient(x):
        found = jnp.einsum("njk,nk->nj", quadratic.HESSIANS, x) - quadratic.LINEAR
        return found.at[3].set(jnp.where(jnp.abs(x[3] - flat).max() < 1e-12, 0, found[3]))

    ((_, found, _),) = rounds_of(algorithms.sam(algorithms.dsgd(SGD), 0.1), quadratic.ring(), 1, at, gradient)
    np.testing.assert_allclose(found, quadratic.RING @ (at - 0.05 * gradient(worst)), atol=1e-13)


@pytest.mark.usefixtures("x64")
def test_schedules_may_reach_0():
    """Quasi-global momentum divides by the rate; gossiped momentum goes on."""

    def schedule(number):
        return jnp.where(number == 2, 0.0, 0.05)

    for algorithm in (algorithms.quasi_global_momentum, algorithms.gossip_momentum):
        found = [models for _, models, _ in rounds_of(algorithm(schedule, 0.9), quadratic.ring(), 5)]
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found[2], quadratic.RING @ found[1], atol=1e-14)


# Parity with the reference


class Rival(NamedTuple):
    """An algorithm and its twin."""

    algorithm: algorithms.Algorithm
    twin: Callable  # in `reference`, of (models, rounds, *arguments)
    arguments: tuple
    size: Callable  # bytes per message of d float64 parameters
    stands_for: tuple[str, ...]  # rows of the catalogue
    exchange: Mapping[str, Any] = MappingProxyType({})  # how nodes talk, see `exchanged`


def matrices_of(topology):
    found = [matrix.toarray() for matrix in topology.matrices or ()]
    return found or [reference.metropolis_hastings(topology.num_nodes, topology.edges)]


def shares(topology):
    """Node j keeps and sends equal shares."""
    if topology.matrices is not None:
        return matrices_of(topology)
    heard = topology.heard().toarray() + np.eye(NODES)
    return [heard / heard.sum(axis=0)]


def halved(topology):
    return [(np.eye(NODES) + w) / 2 for w in matrices_of(topology)]


def digraph():
    arcs = [(j, (j + step) % NODES) for j in range(NODES) for step in (1, 3) if step == 1 or j % 2 == 0]
    graph = nx.DiGraph()
    graph.add_nodes_from(range(NODES))
    graph.add_edges_from(arcs)
    return topologies.from_networkx(graph)


def largest(count):
    """Keeps the largest entries, by sorting."""

    def compress(number, node, x):
        del number, node
        kept = sorted(range(len(x)), key=lambda i: (-abs(x[i]), i))[:count]
        return np.array([x[i] if i in kept else 0.0 for i in range(len(x))])

    return compress


def run_key():
    """The key of the rounds of a run with seed 0."""
    return np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0, impl="threefry2x32"))[1]))


def node_key(number, node):
    """The key of a node in a round of a run with seed 0."""
    folded = reference.folded(run_key(), reference.Fates.STEPS, number, node)
    return jax.random.wrap_key_data(jnp.array(folded, jnp.uint32), impl="threefry2x32")


def random_entries(count):
    def compress(number, node, x):
        order = np.argsort(-np.asarray(jax.random.uniform(node_key(number, node), x.shape)), kind="stable")
        return np.where(np.isin(np.arange(len(x)), order[:count]), x, 0.0)

    return compress


def rounded(levels):
    def compress(number, node, x):
        noise = np.asarray(jax.random.uniform(node_key(number, node), x.shape, jnp.float64))
        norm, omega = np.linalg.norm(x), min(len(x) / levels**2, math.sqrt(len(x)) / levels)
        return norm * np.sign(x) * np.floor(levels * abs(x) / norm + noise) / levels / (1 + omega)

    return compress


def falling(number):
    return 0.1 if number < 3 else 0.05


def wrapped(algorithm):
    """Everything that an algorithm can be wrapped in, in one program."""
    return algorithms.sam(algorithms.repeated_gossip(algorithms.local_steps(algorithm, 3), 2), 0.2)


WRAPPED = {"every": 3, "times": 2, "radius": 0.2}
RIVALS = {
    "tracking": Rival(
        algorithms.gradient_tracking(optax.sgd(0.1)),
        reference.gradient_tracking,
        (0.1,),
        lambda d: 16 * d,
        ("gradient_tracking",),
    ),
    "tracking, averaging": Rival(
        algorithms.gradient_tracking(optax.sgd(0.05, momentum=0.9), clique_averaging=True),
        reference.gradient_tracking,
        (0.05, 0.9),
        lambda d: 16 * d,
        ("gradient_tracking",),
        {"averaging": True},
    ),
    "D2": Rival(algorithms.d2(optax.sgd(0.1), lazy=False), reference.d2, (0.1,), lambda d: 8 * d, ("d2",)),
    "D2, lazy": Rival(
        algorithms.d2(optax.sgd(0.1), lazy=True),
        reference.d2,
        (0.1,),
        lambda d: 8 * d,
        ("d2",),
        {"matrices": halved},
    ),
    "quasi-global momentum": Rival(
        algorithms.quasi_global_momentum(optax.piecewise_constant_schedule(0.1, {3: 0.5}), 0.8),
        reference.quasi_global_momentum,
        (falling, 0.8),
        lambda d: 8 * d,
        ("quasi_global_momentum",),
    ),
    "quasi-global Nesterov": Rival(
        algorithms.quasi_global_momentum(0.05, 0.9, True),
        reference.quasi_global_momentum,
        (0.05, 0.9, True),
        lambda d: 8 * d,
        ("quasi_global_momentum",),
    ),
    "push-sum": Rival(
        algorithms.push_sum(optax.sgd(0.1)),
        reference.push_sum,
        (0.1,),
        lambda d: 8 * d + 4,
        ("push_sum",),
        {"matrices": shares},
    ),
    "CHOCO, top-k": Rival(
        algorithms.choco(optax.sgd(0.1), compressors.top_k(0.2), 0.5, clique_averaging=None),
        reference.choco,
        (0.1, 0.5, largest(7)),
        lambda d: 8 * 7,
        ("choco",),
        {"averaging": True},
    ),
    "CHOCO, random-k": Rival(
        algorithms.choco(optax.sgd(0.1), compressors.random_k(0.5), 0.3),
        reference.choco,
        (0.1, 0.3, random_entries(18)),
        lambda d: 4 * 18 + 8,
        ("choco",),
    ),
    "CHOCO, quantised": Rival(
        algorithms.choco(optax.sgd(0.1), compressors.quantise(15), 0.5),
        reference.choco,
        (0.1, 0.5, rounded(15)),
        lambda d: 22 + 4,  # 35 x 5 bits, and the norm
        ("choco",),
    ),
    "D-SGD, wrapped": Rival(
        wrapped(algorithms.dsgd(optax.sgd(0.1))),
        reference.descent,
        (0.1,),
        lambda d: 8 * d,
        ("local_steps", "repeated_gossip", "sam"),
        {"averaging": True, **WRAPPED},
    ),
    "gossiped momentum, wrapped": Rival(
        wrapped(algorithms.gossip_momentum(0.05, 0.9, clique_averaging=None)),
        reference.gossip_momentum,
        (0.05, 0.9),
        lambda d: 16 * d,
        ("gossip_momentum", "local_steps", "repeated_gossip", "sam"),
        {"averaging": True, **WRAPPED},
    ),
    "Chebyshev": Rival(
        algorithms.repeated_gossip(algorithms.dsgd(optax.sgd(0.1)), 4, chebyshev=True),
        reference.chebyshev_descent,
        (0.1,),
        lambda d: 8 * d,
        ("repeated_gossip[chebyshev]",),
        {"averaging": True, "times": 4},
    ),
    "SAM, tracking": Rival(
        algorithms.sam(algorithms.gradient_tracking(optax.sgd(0.1)), 0.2),
        reference.gradient_tracking,
        (0.1,),
        lambda d: 16 * d,
        ("sam", "gradient_tracking"),
        {"radius": 0.2},
    ),
}
COUNTED = ("messages", "messages_lost", "bytes")
ONLINE = np.random.default_rng(1).random((3, NODES)) < 0.9
KINDS_OF_FAULTS = {
    "message_loss": (faults.message_loss(0.1), (0.1,)),
    "directed message_loss": (faults.message_loss(0.1, directed=True), (0.1,)),
    "bursts": (faults.bursts(0.1, 3), (0.1, 3)),
    "churn": (faults.churn(0.1, 0.6), (0.1, 0.6)),
    "participation": (faults.participation(0.8), (0.8,)),
    "stragglers": (faults.stragglers(0.1), (0.1,)),
    "trace": (faults.trace(ONLINE), (ONLINE,)),
}
# Several kinds happen at the same time: a program for each would take longer.
FAILING = {
    "nothing": set(),
    "everything": set(KINDS_OF_FAULTS),
    "both ways": set(KINDS_OF_FAULTS) - {"directed message_loss"},  # columns of W still sum to 1
    "links": {"message_loss"},
}
DRAWN = ("random_matchings", "epidemic", "epidemic[local]")
MOVING = (*DRAWN, "one_peer_exponential", "base_graph", "sequence")
CLIQUES = [name for name in catalogue.GRAPHS if name.startswith("d_cliques")]
STATIC = ["d_cliques", *(name for name in catalogue.TOPOLOGIES if name not in (*CLIQUES, *MOVING, "hypercube"))]
# Topologies that one program holds. Matrices that change need the same period.
GROUPS = {
    "static": STATIC,
    "symmetric": [name for name in STATIC if catalogue.PROMISES.get(name, "symmetric") == "symmetric"],
    "known": [*STATIC, "digraph"],
    "periodic": ["one_peer_exponential", "base_graph", "sequence"],
}
PARITY = [
    ("tracking", "static", "nothing"),
    ("D2, lazy", "static", "nothing"),
    ("quasi-global momentum", "static", "nothing"),
    ("push-sum", "known", "nothing"),
    ("CHOCO, top-k", "symmetric", "nothing"),
    ("Chebyshev", "symmetric", "nothing"),
    ("gossiped momentum, wrapped", "static", "links"),
    ("tracking", "periodic", "nothing"),
    ("quasi-global momentum", "periodic", "nothing"),
    ("push-sum", "periodic", "nothing"),
    ("gossiped momentum, wrapped", "periodic", "everything"),
    ("D2, lazy", "sequence", "nothing"),
    ("tracking", "epidemic", "nothing"),
    ("quasi-global momentum", "epidemic[local]", "nothing"),
    ("gossiped momentum, wrapped", "epidemic", "nothing"),
    ("SAM, tracking", "random_matchings", "nothing"),
    ("quasi-global momentum", "random_matchings", "nothing"),
    ("gossiped momentum, wrapped", "random_matchings", "links"),
    ("tracking, averaging", "d_cliques[uneven]", "nothing"),
    ("tracking", "d_cliques[uneven]", "both ways"),
    ("D2", "d_cliques[uneven]", "both ways"),
    ("quasi-global Nesterov", "d_cliques[uneven]", "everything"),
    ("D-SGD, wrapped", "fully_connected", "nothing"),
    ("CHOCO, random-k", "fully_connected", "nothing"),
    ("CHOCO, quantised", "ring", "nothing"),
]


def cases(number):
    """The topologies of a row, each with a partition. Partitions and kinds of D-Cliques take turns."""
    names, partition_names = GROUPS.get(PARITY[number][1], [PARITY[number][1]]), list(catalogue.PARTITIONS)
    return [
        (
            CLIQUES[number % len(CLIQUES)] if name == "d_cliques" else name,
            partition_names[(number + turn) % len(partition_names)],
        )
        for turn, name in enumerate(names)
    ]


def kind(topology_name):
    return topology_name.split("[")[0]


def test_every_algorithm_meets_its_twin_with_every_partition_topology_and_fault():
    """What is left out here is refused. The algorithms whose twin is `reference.dsgd` are those of test_parity.py."""
    everywhere = {kind(name) for name in catalogue.TOPOLOGIES if catalogue.nodes_of(name) == NODES}
    symmetric = set(map(kind, GROUPS["symmetric"]))
    on = {
        "d2": {*map(kind, STATIC), "sequence"},
        "push_sum": everywhere - set(map(kind, DRAWN)),
        "choco": symmetric,
        "repeated_gossip[chebyshev]": symmetric,
    }
    under = dict.fromkeys(("push_sum", "choco", "repeated_gossip[chebyshev]"), FAILING["nothing"])
    under |= dict.fromkeys(("gradient_tracking", "d2"), FAILING["both ways"])
    assert {name.split()[-1] for name in KINDS_OF_FAULTS} == public_functions(faults, faults.Fault)
    for name, method in catalogue.ALGORITHMS.items():
        if method.twin is reference.dsgd:
            continue
        numbers = [number for number, row in enumerate(PARITY) if name in RIVALS[row[0]].stands_for]
        assert method.twin in {RIVALS[PARITY[number][0]].twin for number in numbers}, name
        met = [case for number in numbers for case in cases(number)]
        assert {kind(topology) for topology, _ in met} - {"digraph"} == on.get(name, everywhere), name
        assert {partition for _, partition in met} == set(catalogue.PARTITIONS), name
        failed = set().union(*(FAILING[PARITY[number][2]] for number in numbers))
        assert failed == under.get(name, FAILING["everything"]), name


def run(topology, algorithm, dtype=np.float64, **more):
    arguments = {"rounds": ROUNDS, "eval_every": ROUNDS, "batch_size": BATCH, "progress": False}
    model = models.logistic_regression(catalogue.CLASSES)
    arguments |= {"model": model, "algorithm": algorithm, "init": {"Dense_0": start(dtype)}}
    arguments |= {"dataset": catalogue.PARTITIONS["shards"](catalogue.dataset(), NODES)}
    return simulate(topology, **arguments | more)


@functools.cache
def data_of(partition):
    """Runs of one program have one data set, the one of feature_shift, and none has test examples of its nodes."""
    if partition == "feature_shift":
        made = catalogue.PARTITIONS[partition](catalogue.dataset(), NODES)
        return partitions.from_indices(made.dataset, made.indices)
    return catalogue.PARTITIONS[partition](data_of("feature_shift").dataset, NODES)


@functools.cache
def batches_of(partition, most):
    return reference_batches(data_of(partition), 0, ROUNDS, 2 * BATCH, most)


@functools.cache
def graph_of(topology, partition):
    return digraph() if topology == "digraph" else catalogue.TOPOLOGIES[topology](data_of(partition).label_distribution)


def exchanged(topology, batches, told, matrices=matrices_of, averaging=False, **more):
    """The rounds of a run in loops, and its messages."""
    averaging = averaging and topology.clique_ids is not None
    g = reference.neighbourhood_average(NODES, topology.gradient_edges) if averaging else np.eye(NODES)
    fates = reference.Fates(run_key(), NODES, told)
    return reference.exchanges(batches, catalogue.CLASSES, matrices(topology), g, fates, drawn=topology.drawn, **more)


@pytest.mark.parametrize("number", range(len(PARITY)), ids=["-".join(row) for row in PARITY])
@pytest.mark.usefixtures("x64")
def test_equals_the_reference(number):
    """Models, and messages and bytes: a lost message counts as sent. Several topologies are runs of one program."""
    (rival, _, failing), met = PARITY[number], cases(number)
    algorithm, twin, arguments, size, stands_for, exchange = RIVALS[rival]
    graphs, data = [graph_of(*case) for case in met], [data_of(partition) for _, partition in met]
    happening = [(name, *KINDS_OF_FAULTS[name]) for name in KINDS_OF_FAULTS if name in FAILING[failing]]
    more = {"batch_size": 2 * BATCH, "faults": [fault for _, fault, _ in happening]}
    several = len(met) > 1
    if several:
        result = run(graphs, algorithm, dataset=data, seeds=[0] * len(met), **more)
    else:
        result = run(graphs[0], algorithm, dataset=data[0], **more)
    params, state, counted = jax.tree.map(
        lambda leaf: np.asarray(leaf) if several else np.asarray(leaf)[None],
        (result.params["Dense_0"], result.state.algorithm, [getattr(result.history, name) for name in COUNTED]),
    )
    stacked = {name: np.tile(value, (NODES, *[1] * value.ndim)) for name, value in start(float).items()}
    first, most = reference.as_rows(stacked), max(each.sizes.max() for each in data)
    for turn, (graph, (topology, partition)) in enumerate(zip(graphs, met, strict=True)):
        told = [(name, values) for name, _, values in happening]
        rounds, counts = exchanged(graph, batches_of(partition, most), told, **exchange)
        close = {"rtol": 1e-10, "atol": 1e-10, "err_msg": f"{topology}, {partition}"}
        found = reference.as_rows({name: value[turn] for name, value in params.items()})
        np.testing.assert_allclose(found, twin(first, rounds, *arguments), **close)
        of_models, of_gradients, lost = np.sum(counts, axis=0)
        in_bytes = of_models * size(first.shape[1]) + of_gradients * 8 * first.shape[1]
        expected = np.array([of_models + of_gradients, lost, in_bytes]) / NODES
        np.testing.assert_allclose([values[turn, -1] for values in counted], expected, **close)
    if "gradient_tracking" in stands_for:  # the tracked mean is the mean gradient, also if links or nodes fail
        _, tracked, last = state
        jax.tree.map(lambda s, g: np.testing.assert_allclose(s.sum(axis=1), g.sum(axis=1), atol=1e-12), tracked, last)


# The growth of D2


def regular_data():
    """Two classes for each of 100 nodes."""
    return partitions.shards(datasets.synthetic(num_train=2000, num_test=20, input_shape=(2,)), 100, seed=1)


def d2_on(topology):
    """The growth on W and on (I + W) / 2."""
    gossip = topology.weights()
    return d2_growth(gossip), d2_growth(mixing.lazy(gossip))


@pytest.mark.parametrize(
    ("make", "plain", "lazy", "close"),
    [
        (lambda: topologies.grid(10, 10), 1.51, None, 0.01),
        (lambda: topologies.torus(4, 4), 1.58, None, 0.01),  # of an eigenvalue of -0.6: 0.6 + sqrt(0.96)
        (lambda: topologies.hypercube(16), 1.58, None, 0.01),
        (lambda: topologies.ring(16), 1.0, None, 1e-9),  # on the edge
        (lambda: topologies.random_regular(100, 10), 1.26, None, 0.06),
        (lambda: topologies.exponential(100), 1.23, 1.087, 0.006),
        (lambda: topologies.one_peer_exponential(16), 1.32, 0.99, 0.006),
        (lambda: topologies.one_peer_exponential(100), 1.29, 1.11, 0.006),
        (lambda: topologies.base_graph(10, 1), 1.36, 1.02, 0.006),
        (lambda: topologies.base_graph(100, 1), 1.33, 1.15, 0.006),
        (lambda: topologies.base_graph(100, 4), None, 0.89, 0.006),
        (lambda: topologies.stl_fw(regular_data().label_distribution, 5), 0.951, None, 0.05),  # as one other seed
        (lambda: topologies.stl_fw(regular_data().label_distribution, 10), 0.761, None, 0.03),
    ],
)
def test_how_fast_differences_grow_in_d2(make, plain, lazy, close):
    found = d2_on(make())
    for value, known in zip(found, (plain, lazy), strict=True):
        assert known is None or value == pytest.approx(known, abs=close)


@pytest.mark.parametrize(
    ("make", "lazy"),
    [
        (lambda: topologies.ring(16), False),
        (lambda: topologies.fully_connected(16), False),
        (lambda: topologies.d_cliques(regular_data().label_distribution), False),
        (lambda: topologies.d_cliques(regular_data().label_distribution, inter="ring"), False),
        (lambda: topologies.d_cliques(regular_data().label_distribution, inter="small_world"), False),
        (lambda: topologies.stl_fw(regular_data().label_distribution, 5), False),
        (lambda: topologies.stl_fw(regular_data().label_distribution, 10), False),
        (lambda: topologies.grid(10, 10), True),
        (lambda: topologies.torus(4, 4), True),
        (lambda: topologies.hypercube(16), True),
        (lambda: topologies.random_regular(100, 10), True),
        (lambda: topologies.one_peer_exponential(16), True),
        (lambda: topologies.base_graph(100, 4), True),
    ],
)
def test_which_matrix_d2_takes(make, lazy):
    topology = make()
    network = algorithms.d2().network(topology)
    algorithms.d2().traits.check(network)  # accepted
    expected = mixing.lazy(topology.weights()) if lazy else topology.weights()
    for found, matrix in zip(network.gossip.matrices(), expected.matrices(), strict=True):
        np.testing.assert_array_equal(found.toarray(), matrix.toarray())


PACES = {
    "plain": lambda a: a,
    "local": lambda a: algorithms.local_steps(a, 3),
    "repeated": lambda a: algorithms.repeated_gossip(a, 3),
    "Chebyshev": lambda a: algorithms.repeated_gossip(a, 2, chebyshev=True),
}


@pytest.mark.parametrize(
    ("pace", "topology"),
    [
        ("plain", quadratic.ring),
        ("local", quadratic.ring),
        ("Chebyshev", quadratic.ring),
        ("local", lambda: topologies.fully_connected(16)),
        ("Chebyshev", lambda: topologies.fully_connected(16)),
        ("plain", one_peer),
        ("local", one_peer),
        ("repeated", one_peer),
        ("local", lambda: topologies.from_matrices(ahead(1, 4))),
        ("repeated", lambda: topologies.from_matrices(ahead(1, 4))),
    ],
)
@pytest.mark.usefixtures("x64")
def test_the_growth_is_that_of_runs(pace, topology):
    """With a rate of 0, differences grow or shrink by the computed factor, also at another pace of gossip."""
    algorithm = PACES[pace](algorithms.d2(optax.sgd(0.0), lazy=False))
    network, first = algorithm.network(topology()), jnp.asarray(np.random.default_rng(0).normal(size=(16, 5)))
    growth = d2_growth(network.gossip)

    def one(carry, number):
        params, state = carry
        round = Round(number, jax.random.key(0), jnp.arange(16), quadratic.gradients)
        params, state = algorithm.step(params, jnp.zeros_like(params), state, network.at(round), round)
        return (params, state), jnp.linalg.norm(jnp.stack([centred(params), state[1]]))

    # The correction starts at 0, and some modes with it: start all of them.
    state = (algorithm.init(first, network)[0], centred(first[::-1]))
    spread = np.asarray(jax.lax.scan(one, (first, state), jnp.arange(120))[1])
    if growth < 1e-3:
        assert spread[-1] < 1e-12
    else:
        assert (spread[-1] / spread[59]) ** (1 / 60) == pytest.approx(growth, rel=0.02)


def centred(x):
    return x - x.mean(axis=0, keepdims=True)


# Messages and bytes by hand


MODEL = {"kernel": jax.ShapeDtypeStruct((6, 5), np.float32), "bias": jax.ShapeDtypeStruct((5,), np.float32)}


@pytest.mark.parametrize(
    ("algorithm", "size"),
    [
        (algorithms.dsgd(), 140),
        (algorithms.gradient_tracking(), 280),
        (algorithms.d2(), 140),
        (algorithms.gossip_momentum(), 280),
        (algorithms.quasi_global_momentum(), 140),
        (algorithms.push_sum(), 144),
        (algorithms.choco(SGD, compressors.top_k(0.1), 0.5), 8 * 4),
        (algorithms.choco(SGD, compressors.random_k(0.1), 0.5), 4 * 4 + 8),
        (algorithms.choco(SGD, compressors.quantise(15), 0.5), 22 + 4),
        (algorithms.choco(SGD, compressors.quantise(1), 0.5), 9 + 4),
        (algorithms.sam(algorithms.dsgd(), 0.1), 140),
    ],
)
def test_the_size_of_messages(algorithm, size):
    for topology, degree in ((topologies.ring(6), 2), (topologies.fully_connected(6), 5)):
        traffic = algorithm.traits.sends(algorithm.network(topology), MODEL)
        assert traffic.messages.tolist() == [[degree] * 6]
        assert traffic.bytes.tolist() == traffic.received.tolist() == [[degree * size] * 6]
        assert traffic.phases.tolist() == [1]


def test_traffic_by_hand():
    star = topologies.sequence([topologies.ring(6), topologies.from_networkx(nx.star_graph(5))])
    star_sent = [5, 1, 1, 1, 1, 1]  # node 0 sends to all others

    def of(algorithm, topology):
        return algorithm.traits.sends(algorithm.network(topology), MODEL)

    paced = of(algorithms.local_steps(algorithms.gradient_tracking(), 2), star)
    assert paced.messages.tolist() == [[0] * 6, [2] * 6, [0] * 6, star_sent]
    assert paced.bytes.tolist() == [[0] * 6, [560] * 6, [0] * 6, [280 * count for count in star_sent]]
    assert paced.phases.tolist() == [0, 1, 0, 1]
    twice = of(algorithms.repeated_gossip(algorithms.dsgd(), 2), star)
    assert twice.messages.tolist() == [[2 + count for count in star_sent]]
    assert twice.phases.tolist() == [2]
    thrice = of(algorithms.repeated_gossip(algorithms.dsgd(), 3), star)
    assert thrice.messages.sum(axis=1).tolist() == [12 + 10 + 12, 10 + 12 + 10]
    # Gradients of four nodes, whose messages are as large as models, beside compressed models.
    cliques = topologies.from_edges(
        8,
        [*itertools.combinations(range(4), 2), *itertools.combinations(range(4, 8), 2), (0, 4)],
        clique_ids=[0] * 4 + [1] * 4,
    )
    compressed = of(algorithms.choco(SGD, compressors.top_k(0.1), 0.5, clique_averaging=True), cliques)
    assert compressed.messages.tolist() == [[7, 6, 6, 6, 7, 6, 6, 6]]
    assert compressed.bytes.tolist() == [[4 * 32 + 3 * 140, *[3 * 32 + 3 * 140] * 3] * 2]
    assert compressed.phases.tolist() == [2]
    # In a digraph some send more than they receive.
    pushed = of(algorithms.push_sum(), topologies.from_networkx(nx.DiGraph([(0, 1), (1, 0), (1, 2), (2, 0)])))
    assert (pushed.bytes.tolist(), pushed.received.tolist()) == ([[144, 288, 144]], [[288, 144, 144]])


def test_history_counts_lost_messages_and_rounds_without_gossip():
    algorithm = algorithms.local_steps(algorithms.gradient_tracking(), 2)
    graph = topologies.sequence([topologies.ring(NODES), topologies.random_regular(NODES, 4)])
    for given in (None, faults.message_loss(0.3)):
        history = run(graph, algorithm, np.float32, faults=given, rounds=5, eval_every=1).history
        assert history.messages.tolist() == [0, 0, 2, 2, 6, 6]
        assert history.bytes.tolist() == [0, 0, 560, 560, 6 * 280, 6 * 280]
    assert 0 < history.messages_lost[-1] < 6
    assert history.messages_lost[1] == history.messages_lost[0] == 0


# Compressors


def test_quantisation_is_unbiased_but_for_its_scale():
    x = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 2000)
    drawn = np.asarray(jax.vmap(compressors.quantise(15).compress, (0, None))(keys, x))
    omega = math.sqrt(1000) / 15
    assert omega == pytest.approx(2.108, abs=1e-3)
    square = np.square(x).sum()
    deviation = math.sqrt(square) / 15 / 2 / math.sqrt(2000)  # of the mean of an entry, at most
    np.testing.assert_allclose(drawn.mean(axis=0) * (1 + omega), x, atol=6 * deviation)
    unscaled, scaled = (np.square(each - x).sum(axis=1).mean() / square for each in (drawn * (1 + omega), drawn))
    assert unscaled == pytest.approx(0.7452, rel=0.03)
    assert scaled == pytest.approx(0.5375, rel=0.03)
    assert scaled <= 1 - 1 / (1 + omega) == pytest.approx(0.6783, abs=1e-4)
    # As many levels as |x| sqrt(d): the other bound.
    fine = compressors.quantise(100).compress(jax.random.key(1), x)
    assert np.square(fine - x).sum() / square < 1000 / 100**2


def test_top_k_keeps_k_entries_also_if_they_tie():
    ties = jnp.array([1.0, -1.0, 1.0, 1.0, -1.0, 0.5])
    assert compressors.top_k(0.5).compress(jax.random.key(0), ties).tolist() == [1, -1, 1, 0, 0, 0]
    for fraction, kept in ((0.01, 1), (0.07, 7), (0.29, 29), (0.291, 30), (1.0, 100)):
        compressor = compressors.top_k(fraction)
        assert int(jnp.count_nonzero(compressor.compress(jax.random.key(0), jnp.ones(100)))) == kept
        assert compressor.bytes(100) == 8 * kept
        assert compressors.random_k(fraction).bytes(100) == 4 * kept + 8
    x = jnp.asarray(np.random.default_rng(0).normal(size=100))
    rest = x - compressors.top_k(0.2).compress(jax.random.key(0), x)
    assert float(jnp.sum(rest**2)) <= 0.8 * float(jnp.sum(x**2))
    assert float(jnp.abs(rest).max()) <= np.sort(np.abs(x))[-20]


def test_random_k_keeps_entries_as_they_are():
    x = (np.random.default_rng(0).normal(size=50) + 5).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), 2000)
    drawn = np.asarray(jax.vmap(compressors.random_k(0.2).compress, (0, None))(keys, jnp.asarray(x)))
    assert (np.count_nonzero(drawn, axis=1) == 10).all()
    assert ((drawn == 0) | (drawn == x)).all()  # no factor of d / k
    np.testing.assert_allclose((drawn != 0).mean(axis=0), 0.2, atol=0.05)
    left = np.square(drawn - x).sum(axis=1).mean() / np.square(x).sum()
    assert left == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize(
    "compressor", [compressors.top_k(0.3), compressors.random_k(0.3), compressors.quantise(1), compressors.quantise(15)]
)
def test_nothing_stays_nothing(compressor):
    zero = jnp.zeros(7)
    np.testing.assert_array_equal(compressor.compress(jax.random.key(0), zero), zero)
    assert compressor.compress(jax.random.key(0), zero.astype(jnp.bfloat16)).dtype == jnp.bfloat16


# Seeds and checkpoints


EACH = {
    "tracking": algorithms.gradient_tracking(optax.adam(0.01)),
    "D2": algorithms.d2(optax.sgd(0.1, momentum=0.9)),
    "gossiped momentum": algorithms.gossip_momentum(0.05),
    "quasi-global momentum": algorithms.quasi_global_momentum(optax.exponential_decay(0.1, 3, 0.5)),
    "push-sum": algorithms.push_sum(),
    "CHOCO": algorithms.choco(optax.sgd(0.1), compressors.quantise(7), 0.4),
    "CHOCO, random-k": algorithms.choco(optax.sgd(0.1), compressors.random_k(0.3), 0.4),
    "local steps": algorithms.local_steps(algorithms.dsgd(optax.sgd(0.1)), 3),
    "repeated gossip": algorithms.repeated_gossip(algorithms.dsgd(optax.sgd(0.1)), 2),
    "Chebyshev": algorithms.repeated_gossip(algorithms.dsgd(optax.sgd(0.1)), 3, chebyshev=True),
    "SAM": algorithms.sam(algorithms.gradient_tracking(), 0.1),
}
MEASURED = ("loss", "train_loss", "messages", "bytes", "consensus_distance")


@pytest.mark.parametrize("name", EACH)
def test_seeds_are_single_runs_and_runs_resume_to_the_same_bits(name, tmp_path, monkeypatch):
    monkeypatch.setattr("dcliques_jax._store.checkpoints._SPACING", 0)
    # Of other degrees for other seeds: their matrices must take one form.
    graphs = [topologies.ring(NODES, seed=1), TOPOLOGIES["cliques"]()]
    arguments = {"algorithm": EACH[name], "dtype": np.float32, "rounds": 8, "eval_every": 2}
    both = run(graphs, seeds=[0, 1], **arguments)
    alone = [run(graph, seed=seed, **arguments) for seed, graph in enumerate(graphs)]
    for number, one in enumerate(alone):
        jax.tree.map(
            lambda a, b, number=number: np.testing.assert_allclose(a[number], b, rtol=1e-5, atol=1e-6),
            both.state,
            one.state,
        )
        for measure in MEASURED:
            found, expected = getattr(both.history, measure)[number], getattr(one.history, measure)
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=measure)
    run(graphs[1], seed=1, checkpoint_dir=tmp_path, on_evaluation=lambda record: record.round == 4, **arguments)
    resumed = run(graphs[1], seed=1, checkpoint_dir=tmp_path, **arguments)
    jax.tree.map(np.testing.assert_array_equal, resumed.state, alone[1].state)
    for measure in MEASURED:
        np.testing.assert_array_equal(getattr(resumed.history, measure), getattr(alone[1].history, measure))


# What is refused


def refused(algorithm, topology, fault=None):
    data = partitions.iid(datasets.synthetic(num_train=400, num_test=10, input_shape=(2,)), topology.num_nodes)
    simulate(topology, data, algorithm=algorithm, faults=fault, rounds=2, progress=False)


CHOCO = algorithms.choco(SGD, compressors.top_k(0.5), 0.5)
CHEBYSHEV = algorithms.repeated_gossip(algorithms.dsgd(), 3, chebyshev=True)
DIRECTED = faults.message_loss(0.1, directed=True)
TRACKING_AVERAGES = algorithms.gradient_tracking(clique_averaging=True)


def whole_cliques():
    return topologies.d_cliques(np.eye(5)[np.arange(20) % 5], clique_size=5)


def incomplete_cliques():
    return topologies.remove_intra_clique_edges(whole_cliques(), 1)


def local_epidemic():
    return topologies.epidemic(20, 3, local=True)


@pytest.mark.parametrize(
    ("algorithm", "topology", "fault", "message"),
    [
        (algorithms.d2(), lambda: topologies.one_peer_exponential(100), None, r"1.11 per round.*gradient_tracking"),
        (algorithms.d2(), lambda: topologies.base_graph(10, 1), None, r"1.02 per round.*gradient_tracking"),
        (algorithms.d2(), lambda: topologies.base_graph(100, 1), None, r"1.15 per round.*gradient_tracking"),
        (algorithms.d2(), lambda: topologies.exponential(100), None, r"1.09 per round.*gradient_tracking"),
        (algorithms.d2(lazy=False), lambda: topologies.torus(4, 5), None, "lazy=True"),
        (algorithms.d2(), lambda: topologies.random_matchings(20), None, "drawn in every round: use gradient_tracking"),
        (algorithms.d2(), lambda: topologies.epidemic(20, 3), None, "drawn in every round: use gradient_tracking"),
        (algorithms.d2(), local_epidemic, None, "use gradient_tracking|column"),
        (
            algorithms.dsgd(),
            digraph,
            None,
            r"node 0 sends to 2 others, and node 0 to 2 and hears from 1\. Use algorithms.push_sum",
        ),
        (algorithms.local_steps(algorithms.d2(), 2), lambda: topologies.ring(20), None, "D2 is unstable.*tracking"),
        (
            algorithms.local_steps(algorithms.d2(), 3),
            lambda: topologies.fully_connected(20),
            None,
            "D2 is unstable.*lazy=True",
        ),
        (
            algorithms.repeated_gossip(algorithms.d2(), 2, chebyshev=True),
            lambda: topologies.ring(20),
            None,
            "D2 is unstable",
        ),
        (algorithms.d2(), lambda: topologies.ring(20), DIRECTED, "columns of W no longer sum to 1.*algorithms.dsgd"),
        (algorithms.gradient_tracking(), lambda: topologies.ring(20), DIRECTED, "losses in both directions"),
        (algorithms.gradient_tracking(), local_epidemic, None, "column"),
        (TRACKING_AVERAGES, incomplete_cliques, None, "columns of G do not sum to 1.*clique_averaging=False"),
        (algorithms.local_steps(TRACKING_AVERAGES, 2), incomplete_cliques, None, "columns of G do not sum to 1"),
        (algorithms.d2(clique_averaging=True), incomplete_cliques, None, "columns of G do not sum to 1"),
        (
            TRACKING_AVERAGES,
            whole_cliques,
            faults.message_loss(0.1),
            "if links fail.*with clique_averaging=False",
        ),
        (TRACKING_AVERAGES, whole_cliques, faults.churn(0.1, 0.5), "if nodes fail.*clique_averaging=False"),
        (
            algorithms.gradient_tracking(),
            lambda: topologies.exponential(20),
            faults.message_loss(0.1),
            "asymmetric gossip matrix.*algorithms.dsgd",
        ),
        (CHOCO, lambda: topologies.ring(20), faults.message_loss(0.1), "not right if links fail.*omit the fault"),
        (CHOCO, lambda: topologies.ring(20), DIRECTED, "not right if links fail.*omit the fault"),
        (CHOCO, lambda: topologies.ring(20), faults.bursts(0.1, 3), "not right if links fail.*omit the fault"),
        (CHOCO, lambda: topologies.ring(20), faults.churn(0.1, 0.5), "not right if nodes fail.*omit the fault"),
        (CHOCO, lambda: topologies.ring(20), faults.stragglers(0.1), "not right if nodes fail.*omit the fault"),
        (CHOCO, lambda: topologies.exponential(20), None, "asymmetric.*metropolis_hastings"),
        (CHOCO, lambda: topologies.base_graph(20, 1), None, "hear every change.*one matrix"),
        (CHOCO, lambda: topologies.random_matchings(20), None, "hear every change.*one matrix"),
        (algorithms.local_steps(CHOCO, 2), lambda: topologies.ring(20), None, "omit local_steps"),
        (algorithms.repeated_gossip(CHOCO, 2), lambda: topologies.ring(20), None, "omit local_steps and repeated"),
        (algorithms.push_sum(), lambda: topologies.ring(20), faults.message_loss(0.1), "omit the fault"),
        (algorithms.push_sum(), lambda: topologies.ring(20), faults.churn(0.1, 0.5), "omit the fault"),
        (algorithms.push_sum(), lambda: topologies.random_matchings(20), None, "graphs that are known before"),
        (CHEBYSHEV, lambda: topologies.base_graph(20, 1), None, "needs one matrix.*omit chebyshev"),
        (CHEBYSHEV, lambda: topologies.random_matchings(20), None, "needs one matrix.*omit chebyshev"),
        (CHEBYSHEV, lambda: topologies.exponential(20), None, "symmetric"),
        (CHEBYSHEV, lambda: topologies.ring(20), faults.message_loss(0.1), "omit the fault"),
        (CHEBYSHEV, lambda: topologies.ring(20), faults.stragglers(0.1), "omit the fault"),
        (algorithms.repeated_gossip(CHEBYSHEV, 2), lambda: topologies.ring(20), None, "to one repeated_gossip"),
    ],
)
def test_what_algorithms_cannot_do_is_refused_before_anything_is_compiled(algorithm, topology, fault, message):
    graph = topology()
    with monitoring.compilations() as compiled, pytest.raises(ValueError, match=message):
        refused(algorithm, graph, fault)
    assert compiled == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: algorithms.local_steps(algorithms.dsgd(), 0), "k=0 must be"),
        (lambda: algorithms.local_steps(optax.sgd(0.1), 2), r"not an algorithm: pass for example algorithms.dsgd\(\)"),
        (lambda: algorithms.local_steps(algorithms.dsgd, 2), "not an algorithm"),
        (lambda: algorithms.repeated_gossip(algorithms.dsgd(), 1.5), "times=1.5 must be"),
        (lambda: algorithms.repeated_gossip(algorithms.dsgd(), 0), "times=0 must be"),
        (lambda: algorithms.repeated_gossip(algorithms.dsgd(), 2, chebyshev=1), "chebyshev=1 must be True or False"),
        (lambda: algorithms.repeated_gossip(None, 2), "not an algorithm"),
        (lambda: algorithms.sam(algorithms.dsgd(), -1), "radius=-1 must be"),
        (lambda: algorithms.sam(algorithms.dsgd(), "far"), "radius='far' must be"),
        (lambda: algorithms.sam(3, 0.1), "not an algorithm"),
        (lambda: compressors.top_k(0), "fraction=0.*number above 0"),
        (lambda: compressors.random_k(0), "fraction=0.*number above 0"),
        (lambda: compressors.top_k(1.5), "fraction=1.5 must be"),
        (lambda: compressors.quantise(0), "levels=0 must be"),
        (lambda: compressors.quantise(2.5), "levels=2.5 must be"),
        (lambda: algorithms.choco(SGD, compressors.top_k(0.5), 2), "step_size=2 must be"),
        (lambda: algorithms.choco(SGD, compressors.top_k(0.5), 0), "step_size=0.*above 0"),
        (lambda: algorithms.choco(SGD, 3, 0.5), r"compressor=3 is not a compressor: pass.*compressors.top_k"),
        (lambda: algorithms.choco(SGD, compressors.top_k, 0.5), "is not a compressor"),
        (lambda: algorithms.choco(0.1, compressors.top_k(0.5), 0.5), "not an optax transformation"),
        (lambda: algorithms.gossip_momentum(-1), "learning_rate=-1 must be"),
        (lambda: algorithms.gossip_momentum(0.1, 2), "momentum=2 must be"),
        (lambda: algorithms.gossip_momentum(0.1, lambda t: 0.9), "momentum=<function .* must be a number"),
        (lambda: algorithms.quasi_global_momentum(-1), "learning_rate=-1 must be"),
        (lambda: algorithms.quasi_global_momentum(0.1, 2), "momentum=2 must be"),
        (lambda: algorithms.quasi_global_momentum(0.1, 0.9, "yes"), "nesterov='yes' must be True or False"),
        (lambda: algorithms.gradient_tracking(0.1), "not an optax transformation"),
        (lambda: algorithms.d2(0.1), "not an optax transformation"),
        (lambda: algorithms.d2(lazy="yes"), "lazy='yes' must be True, False or None"),
        (lambda: algorithms.push_sum(0.1), "not an optax transformation"),
        (lambda: algorithms.gradient_tracking(clique_averaging="yes"), "clique_averaging='yes' must be"),
    ],
)
def test_impossible_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
