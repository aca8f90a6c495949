"""Cliques without a centre: known figures, a twin that sends every message, invariants, faults."""

import itertools

import networkx as nx
import numpy as np
import pytest

from dcliques_jax import cliques, datasets, partitions, topologies
from dcliques_jax._random import generator

# The labels of MNIST's 50,000 training images, and those of CIFAR-10's
MNIST = np.repeat(np.arange(10), [4943, 5607, 4926, 5121, 4860, 4529, 4960, 5237, 4877, 4940])
CIFAR10 = np.repeat(np.arange(10), 5000)


def shards(num_nodes, seed, labels=MNIST):
    dataset = datasets.from_arrays(np.zeros((50_000, 1)), labels, np.zeros((10, 1)), np.arange(10))
    return partitions.shards(dataset, num_nodes, seed=seed).label_distribution


# Estimates of the global distribution


def test_push_sum_keeps_sums_and_is_the_loop_over_nodes():
    p = shards(20, 1)
    rng = generator(4)
    sums, weights = p.copy(), np.ones(20)
    for _ in range(12):
        chosen = (np.arange(20) + rng.integers(1, 20, 20)) % 20
        new_sums, new_weights = sums / 2, weights / 2
        for node, peer in enumerate(chosen):
            new_sums[peer] = new_sums[peer] + sums[node] / 2
            new_weights[peer] += weights[node] / 2
        sums, weights = new_sums, new_weights
        np.testing.assert_allclose(sums.sum(axis=0), p.sum(axis=0), rtol=1e-12)
        np.testing.assert_allclose(weights.sum(), 20, rtol=1e-12)
    np.testing.assert_allclose(cliques.push_sum_labels(p, 12, seed=4), sums / weights[:, None], rtol=1e-12)


# The largest error over nodes after 5, 10, 20, 30, 40, 60 rounds
ERRORS = {
    "100 nodes, any peer": (100, None, [1.2, 4.0e-1, 6.4e-3, 2.5e-4, 8.1e-6, 4.8e-9]),
    "1000 nodes, any peer": (1000, None, [1.7, 4.0e-1, 3.1e-2, 5.4e-4, 1.5e-5, 3.3e-8]),
    "100 nodes, random graph": (100, "random", [1.6, 0.34, 3.3e-2, 2.8e-3, 3.1e-4, 3.2e-6]),
    "100 nodes, ring": (100, "ring", [1.3, 1.0, 0.82, 0.68, 0.60, 0.49]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_fall_as_known(name):
    """Single draws: the mean of their logarithms over seeds is within a factor of 2.5, after 40 rounds of 5."""
    num_nodes, graph, expected = ERRORS[name]
    made = {
        None: lambda seed: None,
        "random": lambda seed: topologies.random_regular(num_nodes, 10, seed=seed),
        "ring": lambda seed: topologies.ring(num_nodes),
    }[graph]
    found = [
        cliques.push_sum_trajectory(shards(num_nodes, seed), 60, topology=made(seed), seed=seed).error
        for seed in range(5)
    ]
    ratio = np.exp(np.log(found).mean(axis=0))[[5, 10, 20, 30, 40, 60]] / expected
    assert (np.abs(np.log(ratio)) < np.log([2.5, 2.5, 2.5, 2.5, 5, 5])).all(), ratio


def test_push_sum_sends_along_arcs():
    """In a directed ring each node has one receiver, so estimates are known."""
    ring = topologies.from_networkx(nx.cycle_graph(6, nx.DiGraph))
    p = np.eye(6)
    held = p.copy()
    for _ in range(3):
        held = held / 2 + np.roll(held, 1, axis=0) / 2
    np.testing.assert_allclose(cliques.push_sum_labels(p, 3, topology=ring), held, rtol=1e-12)


def test_push_sum_finds_the_means_of_features():
    means = np.random.default_rng(0).normal(size=(50, 7)) * 30
    np.testing.assert_allclose(cliques.push_sum_labels(means, 80), np.tile(means.mean(axis=0), (50, 1)), rtol=1e-5)
    assert cliques.push_sum_trajectory(means, 80).error[-1] < 1e-3


def test_push_sum_counts_one_message_per_node_and_round():
    found = cliques.push_sum_trajectory(shards(50, 0), 7)
    np.testing.assert_array_equal(found.messages, np.arange(8))
    np.testing.assert_array_equal(found.bytes, np.arange(8) * 11 * 4)


# Greedy Swap by messages


def twin(p, size, rounds, seed, loss=0.0):
    """The protocol with loops, and every message as (kind, numbers in it)."""
    n, classes = p.shape
    ids = cliques.random_cliques(n, size, seed=seed)
    rng, sent = generator(seed, 1), []
    for i, j in itertools.permutations(range(n), 2):
        if ids[i] == ids[j]:
            sent.append(("hello", classes))
    count = ids.max() + 1
    failures, skews = [0] * count, [cliques.skew(ids, p).mean()]

    def arrives(kind, numbers):
        sent.append((kind, numbers))
        return loss == 0 or rng.random() >= loss

    def repeated(kind, numbers, times):
        copies = [1] * times if loss == 0 or times == 0 else rng.geometric(1 - loss, times)
        sent.extend([(kind, numbers)] * int(np.sum(copies)))

    def distance(nodes):
        return np.abs(np.mean([p[i] for i in nodes], axis=0) - p.mean(axis=0)).sum()

    for _ in range(rounds):
        busy, engaged = set(), []
        for clique in rng.permutation(count):
            starts = rng.random() < 0.5 and failures[clique] < 2 * count
            if not starts or clique in busy or count == 1:
                continue
            asking = min(i for i in range(n) if ids[i] == clique)
            node = (asking + rng.integers(1, n)) % n
            if arrives("question", 1) and ids[node] != clique and ids[node] not in busy:
                busy |= {clique, ids[node]}
                engaged.append((clique, node))
        for clique, node in engaged:
            other = ids[node]
            mine, theirs = ([i for i in range(n) if ids[i] == c] for c in (clique, other))
            if not arrives("offer", len(mine) * classes):
                continue
            now = distance(mine) + distance(theirs)
            better = [
                (i, j)
                for i in mine
                for j in theirs
                if distance([*(set(mine) - {i}), j]) + distance([*(set(theirs) - {j}), i]) < now - 1e-12
            ]
            if not arrives("answer", 2):
                continue
            failures[clique] += 1
            if better:
                i, j = better[rng.integers(len(better))]
                ids[i], ids[j] = other, clique
                failures[clique] = failures[other] = 0
                for members in (mine, theirs):
                    repeated("list", len(members) * classes, 1)
                    repeated("notice", classes, len(members) - 1)
        skews.append(cliques.skew(ids, p).mean())
    return ids, skews, len(sent) / n, 4 * sum(numbers for _, numbers in sent) / n


@pytest.mark.parametrize("loss", [0.0, 0.3])
@pytest.mark.parametrize("size", [1, 4, 25])
@pytest.mark.parametrize("ties", [False, True])  # whether many exchanges are equally good
def test_every_message_is_counted(ties, size, loss):
    p = shards(25, 1, CIFAR10) if ties else np.random.default_rng(3).dirichlet(np.full(5, 0.3), 25)
    ids, skews, messages, total = twin(p, size, 30, 2, loss)
    found = cliques.decentralised_trajectory(p, size, rounds=30, seed=2, message_loss=loss)
    ours = cliques.decentralised_greedy_swap(p, size, rounds=30, seed=2, message_loss=loss)
    np.testing.assert_array_equal(ours, ids)
    np.testing.assert_allclose(found.skew, skews, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose([found.messages[-1], found.bytes[-1]], [messages, total], rtol=1e-12)


def test_one_clique_asks_nobody():
    for p, size in ((np.eye(5), 5), (np.ones((1, 1)), 1)):
        found = cliques.decentralised_trajectory(p, size, rounds=20)
        assert (found.messages == size - 1).all()
        assert not cliques.decentralised_greedy_swap(p, size, rounds=20).any()


@pytest.mark.parametrize(
    ("labels", "messages", "last"),
    [(MNIST, 29.4, (138, 185)), (CIFAR10, 18.7, (80, 185))],
    ids=["MNIST", "CIFAR-10"],
)
def test_cliques_stop_asking(labels, messages, last):
    found = [
        cliques.decentralised_trajectory(shards(100, seed, labels), 10, rounds=400, seed=seed) for seed in range(8)
    ]
    ends = [np.flatnonzero(np.diff(each.messages))[-1] + 1 for each in found]
    assert last[0] < np.mean(ends) < last[1]
    assert np.mean([each.messages[-1] - each.messages[0] for each in found]) == pytest.approx(messages, rel=0.1)


@pytest.mark.parametrize(
    ("labels", "num_nodes", "expected", "messages"),
    [
        (MNIST, 100, [0.508, 0.302, 0.158, 0.091, 0.071, 0.063], 25.6),
        (CIFAR10, 100, [0.496, 0.214, 0.092, 0.038, 0.016, 0.016], 17),
        (MNIST, 1000, [0.541, 0.318, 0.170, 0.105, 0.075, 0.068], None),
    ],
    ids=["MNIST", "CIFAR-10", "MNIST, 1000 nodes"],
)
def test_skew_falls_as_known(labels, num_nodes, expected, messages):
    found = [
        cliques.decentralised_trajectory(shards(num_nodes, seed, labels), 10, rounds=200, seed=seed)
        for seed in range(1 if num_nodes > 100 else 5)
    ]
    skews = np.mean([each.skew for each in found], axis=0)[[0, 10, 25, 50, 100, 200]]
    np.testing.assert_allclose(skews, expected, atol=0.055)
    assert all((np.diff(each.skew) < 1e-12).all() for each in found)  # with exact estimates it never rises
    if messages:
        assert np.mean([each.messages[100] - each.messages[0] for each in found]) == pytest.approx(messages, rel=0.1)


def test_it_comes_close_to_the_central_algorithm_with_estimates():
    central, own = [], []
    for seed in range(4):
        p = shards(100, seed)
        central.append(cliques.skew(cliques.greedy_swap(p, 10, seed=seed), p).mean())
        estimates = cliques.push_sum_labels(p, 25, seed=seed)
        ids = cliques.decentralised_greedy_swap(p, 10, rounds=200, seed=seed, estimates=estimates)
        own.append(cliques.skew(ids, p).mean())
        assert np.bincount(ids).tolist() == [10] * 10
        topologies.d_cliques(p, cliques=ids)
    assert np.mean(own) < np.mean(central) + 0.02


def test_it_stands_lost_messages_and_churn():
    p = shards(100, 1)
    online = np.random.default_rng(0).random((60, 100)) < 0.7
    found = cliques.decentralised_trajectory(p, 10, rounds=400, message_loss=0.2, online=online)
    ids = cliques.decentralised_greedy_swap(p, 10, rounds=400, message_loss=0.2, online=online)
    assert np.bincount(ids).tolist() == [10] * 10
    assert found.skew[-1] < 0.12 < found.skew[0]
    asleep = np.zeros((1, 100), bool)
    np.testing.assert_array_equal(
        cliques.decentralised_greedy_swap(p, 10, rounds=5, online=asleep), cliques.random_cliques(100, 10)
    )
    half = np.arange(100)[None] < 50
    stayed = cliques.decentralised_greedy_swap(p, 10, rounds=50, online=half)
    np.testing.assert_array_equal(stayed[50:], cliques.random_cliques(100, 10)[50:])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cliques.push_sum_labels(np.eye(3), -1), "rounds=-1"),
        (lambda: cliques.push_sum_labels(np.eye(3), 2, topology=topologies.ring(4)), "topology has 4 nodes"),
        (lambda: cliques.push_sum_labels(np.ones((1, 1)), 2), "at least two nodes"),
        (lambda: cliques.push_sum_labels(np.eye(4), 2, topology="ring"), "topology='ring' is not a Topology"),
        (
            lambda: cliques.push_sum_labels(np.eye(4), 2, topology=topologies.random_matchings(4)),
            "random matchings changes from round to round",
        ),
        (
            lambda: cliques.push_sum_labels(np.eye(4), 2, topology=topologies.one_peer_exponential(4)),
            "changes from round to round",
        ),
        (lambda: cliques.decentralised_greedy_swap(np.eye(4), 2, message_loss=1), "message_loss=1"),
        (lambda: cliques.decentralised_greedy_swap(np.eye(4), 2, estimates=np.eye(3)), "estimates must be"),
        (
            lambda: cliques.decentralised_greedy_swap(np.eye(4), 2, estimates=np.full((4, 4), np.nan)),
            "row 0 of estimates",
        ),
        (lambda: cliques.decentralised_greedy_swap(np.eye(4), 2, online=[True] * 4), "online has shape"),
        (lambda: cliques.decentralised_greedy_swap(np.eye(4), 2, online=np.full((1, 4), 0.3)), "online holds 0.3"),
        (lambda: cliques.decentralised_trajectory(np.eye(4), 2, steps=4), "steps=4 is unknown"),
    ],
)
def test_impossible_constructions_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
