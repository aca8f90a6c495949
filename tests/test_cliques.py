from unittest import mock

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

import reference
from dcliques_jax import cliques, datasets, partitions
from dcliques_jax._cliques import central


def label_distributions(num_nodes, num_classes=4, seed=0):
    return np.random.default_rng(seed).dirichlet(np.full(num_classes, 0.3), size=num_nodes)


def members(ids):
    return [np.flatnonzero(ids == clique).tolist() for clique in range(ids.max() + 1)]


def in_turn(most):
    """Greedy Swap makes its steps one after another up to this many cliques, and at once with more."""
    return mock.patch.object(central, "_MOST_IN_TURN", most)


cases = st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(0, 1000)).filter(lambda case: case[1] <= case[0])


@given(cases)
def test_skew_equals_the_reference(case):
    num_nodes, clique_size, seed = case
    p = label_distributions(num_nodes, seed=seed)
    ids = cliques.random_cliques(num_nodes, clique_size, seed=seed)
    expected = [reference.skew(clique, p) for clique in members(ids)]
    np.testing.assert_allclose(cliques.skew(ids, p), expected, atol=1e-12)


@pytest.mark.parametrize("most", [0, 100])
@given(case=cases)
def test_sizes_are_full_but_for_the_last(most, case):
    num_nodes, clique_size, seed = case
    full, rest = divmod(num_nodes, clique_size)
    expected = [clique_size] * full + [rest] * (rest > 0)
    p = label_distributions(num_nodes, seed=seed)
    assert np.bincount(cliques.random_cliques(num_nodes, clique_size, seed=seed)).tolist() == expected
    with in_turn(most):
        assert np.bincount(cliques.greedy_swap(p, clique_size, max_steps=30, seed=seed)).tolist() == expected


@pytest.mark.parametrize("most", [0, 100])
@given(case=cases)
def test_greedy_swap_never_raises_the_skew(most, case):
    num_nodes, clique_size, seed = case
    p = label_distributions(num_nodes, seed=seed)
    start = cliques.random_cliques(num_nodes, clique_size, seed=seed)
    with in_turn(most):
        trajectory = cliques.skew_trajectory(p, clique_size, max_steps=60, seed=seed)
        end = cliques.greedy_swap(p, clique_size, max_steps=60, seed=seed)
    assert trajectory.shape == (61,)
    assert (np.diff(trajectory) < 1e-12).all()
    assert trajectory[0] == pytest.approx(cliques.skew(start, p).mean())
    assert trajectory[-1] == pytest.approx(cliques.skew(end, p).mean(), abs=1e-9)


@pytest.mark.parametrize("most", [0, 100])
@given(seed=st.integers(0, 1000))
def test_a_greedy_step_makes_one_improving_exchange_between_two_cliques(most, seed):
    p = label_distributions(12, seed=seed)
    for steps in range(5):
        with in_turn(most):
            before = cliques.greedy_swap(p, 4, max_steps=steps, seed=seed)
            after = cliques.greedy_swap(p, 4, max_steps=steps + 1, seed=seed)
        moved = np.flatnonzero(before != after)
        if len(moved) == 0:
            continue
        i, j = moved  # exactly two nodes change places
        assert (after[i], after[j]) == (before[j], before[i])
        total = [sum(reference.skew(clique, p) for clique in members(ids)) for ids in (before, after)]
        assert total[1] < total[0] + 1e-12


@pytest.mark.parametrize("most", [0, 100])
def test_greedy_swap_chooses_uniformly_among_improving_exchanges(most):
    """Two cliques of three nodes: all exchanges that help are counted by hand, and each comes up equally often."""
    p = np.array([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1], [0.1, 0.2, 0.7]])
    found = {}
    for seed in range(3000):
        start = cliques.random_cliques(6, 3, seed=seed)
        groups = frozenset(map(frozenset, members(start)))
        with in_turn(most):
            end = cliques.greedy_swap(p, 3, max_steps=1, seed=seed)
        found.setdefault(groups, []).append(frozenset(map(frozenset, members(end))))
    checked = 0
    for groups, ends in found.items():
        one, two = map(sorted, groups)
        before = reference.skew(one, p) + reference.skew(two, p)
        better = set()
        for i in one:
            for j in two:
                new = [sorted({*one, j} - {i}), sorted({*two, i} - {j})]
                if sum(reference.skew(clique, p) for clique in new) < before - 1e-9:
                    better.add(frozenset(map(frozenset, new)))
        if not better:
            continue
        assert set(ends) == better
        counts = np.array([ends.count(option) for option in better])
        expected = len(ends) / len(better)
        assert ((counts - expected) ** 2 / expected).sum() < 4 * len(better) + 10  # chi-squared, far in the tail
        checked += len(better) > 1
    assert checked > 3


def one_by_one(order, deviation, pairs, clique_size, draws):
    """Algorithm 2, given which cliques meet and for each step a number in [0, 1) that chooses an exchange."""
    groups = [list(order[start : start + clique_size]) for start in range(0, len(order), clique_size)]

    def total(*both):
        return sum(abs(deviation[group].mean(axis=0)).sum() for group in both)

    changes = []
    for (a, b), draw in zip(pairs, draws, strict=True):
        one, two, better = groups[a], groups[b], []
        for i in range(len(one)):
            for j in range(len(two)):
                new = [*one[:i], two[j], *one[i + 1 :]], [*two[:j], one[i], *two[j + 1 :]]
                if total(*new) < total(one, two):
                    better.append(new)
        changes.append(0.0)
        if better:
            groups[a], groups[b] = better[int(draw * len(better))]
            changes[-1] = total(groups[a], groups[b]) - total(one, two)
    return np.concatenate(groups), changes


@pytest.mark.parametrize("num_nodes", [64, 60])  # the last of eight cliques is full, or half of one
def test_steps_at_once_equal_steps_one_by_one(num_nodes):
    """On fractions whose sums are exact in any order: all shifts of a row in the data, so that the mean is 1/4, too."""
    rows = np.random.default_rng(0).multinomial(8, [0.4, 0.3, 0.2, 0.1], size=num_nodes // 4) / 8
    p = np.concatenate([np.roll(rows, shift, axis=1) for shift in range(4)])
    for seed in range(3):
        rng = np.random.default_rng(seed)
        order, deviation = rng.permutation(num_nodes), p - p.mean(axis=0)
        pairs = np.array([rng.choice(8, 2, replace=False) for _ in range(60)])
        expected, expected_changes = one_by_one(order, deviation, pairs, 8, np.random.default_rng(seed).random(60))
        changes = central._swap_at_once(order, deviation, pairs, 8, np.random.default_rng(seed))
        np.testing.assert_array_equal(order, expected)
        np.testing.assert_array_equal(changes, expected_changes)
        assert (changes < 0).sum() > 10


def test_batches_leave_every_bit_as_it_is():
    p = partitions.shards(datasets.synthetic(num_train=2010), 201, unequal=True).label_distribution
    with in_turn(0):
        found = cliques.greedy_swap(p, 10, max_steps=1000)
        with mock.patch.object(central, "_AT_ONCE", 1):
            np.testing.assert_array_equal(cliques.greedy_swap(p, 10, max_steps=1000), found)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] != pair[1]), max_size=40))
def test_a_round_comes_after_all_earlier_steps_with_the_same_cliques(pairs):
    rounds = central._rounds(np.array(pairs, np.int64).reshape(-1, 2))
    for step, pair in enumerate(pairs):
        earlier = [rounds[other] for other in range(step) if {*pairs[other]} & {*pair}]
        assert rounds[step] == max(earlier, default=0) + 1


@pytest.mark.parametrize("kind", ["shards", "dirichlet"])
def test_steps_at_once_lower_the_skew_as_steps_in_turn_do(kind):
    """Side by side on 200 nodes in 20 cliques: the same distribution of the mean skew, on the way and at the end."""
    if kind == "shards":  # many exchanges of equal skew, and many ways to skew 0
        data = datasets.synthetic(num_train=2000)
        labels = [partitions.shards(data, 200, seed=seed).label_distribution for seed in range(30)]
    else:
        labels = [label_distributions(200, num_classes=10, seed=seed) for seed in range(30)]
    in_turns, at_once = [], []
    for most, found in [(100, in_turns), (0, at_once)]:
        with in_turn(most):
            found += [cliques.skew_trajectory(p, 10, max_steps=600, seed=seed) for seed, p in enumerate(labels)]
    for step in (40, 100, 200, 400, 600):
        one, other = np.array(in_turns)[:, step], np.array(at_once)[:, step]
        assert scipy.stats.ks_2samp(one, other).pvalue > 0.01, step
        assert scipy.stats.ttest_rel(one, other).pvalue > 0.01, step  # pairs: same nodes, same meetings of cliques


def test_many_cliques_get_more_steps_by_default():
    assert cliques.skew_trajectory(label_distributions(200), 2).shape == (1001,)
    assert cliques.skew_trajectory(label_distributions(202), 2).shape == (100 * 101 + 1,)
    p = np.eye(10)[np.arange(1010) % 10]
    assert cliques.skew(cliques.greedy_swap(p, 10), p).mean() < 0.05


@pytest.mark.parametrize(
    ("name", "golden", "tolerance", "last"),
    [
        # Mean over ten seeds after 0, 50, 100, 200, 400 and 1000 steps, from the reference experiments.
        ("mnist", [0.484, 0.210, 0.111, 0.073, 0.066, 0.065], [0.04, 0.04, 0.04, 0.02, 0.01, 0.01], (0.05, 0.085)),
        ("cifar10", [0.482, 0.146, 0.050, 0.012, 0.006, 0.006], [0.04, 0.04, 0.03, 0.02, 0.015, 0.01], (0, 0.021)),
    ],
)
def test_skew_falls_as_in_the_reference_experiments(name, golden, tolerance, last, request):
    data = request.getfixturevalue(name)
    trajectories = np.array(
        [
            cliques.skew_trajectory(partitions.shards(data, 100, seed=seed).label_distribution, 10, seed=seed)
            for seed in range(10)
        ]
    )
    found = trajectories.mean(axis=0)[[0, 50, 100, 200, 400, 1000]]
    assert (np.abs(found - golden) < tolerance).all(), found
    assert last[0] - 1e-9 <= trajectories[:, -1].min()
    assert trajectories[:, -1].max() <= last[1]


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 1000))
def test_ideal_cliques_hold_each_class_once(classes, per_class, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), per_class))
    p = np.eye(classes + 1)[labels]  # one class that no node has
    ids = cliques.ideal_cliques(p, seed=seed)
    assert len(members(ids)) == per_class
    for clique in members(ids):
        assert sorted(labels[clique]) == list(range(classes))
    np.testing.assert_allclose(cliques.skew(ids, p), 0, atol=1e-12)


def test_cliques_depend_on_their_seed_only():
    p = label_distributions(40)
    for build in (
        lambda seed: cliques.random_cliques(40, 10, seed=seed),
        lambda seed: cliques.greedy_swap(p, 10, seed=seed),
        lambda seed: cliques.greedy_swap(label_distributions(303), 3, max_steps=500, seed=seed),
        lambda seed: cliques.ideal_cliques(np.eye(4)[np.arange(40) % 4], seed=seed),
    ):
        np.testing.assert_array_equal(build(1), build(1))
        assert (build(1) != build(2)).any()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: cliques.random_cliques(5, 6), r"clique_size=6 must be an integer in 1\.\.5"),
        (lambda: cliques.greedy_swap(np.eye(5), 0), r"clique_size=0 must be an integer in 1\.\.5"),
        (lambda: cliques.greedy_swap(np.eye(5), 2, max_steps=-1), "max_steps=-1"),
        (
            lambda: cliques.greedy_swap(partitions.iid(datasets.synthetic(), 5), 2),
            r"is not a label distribution: pass its \.label_distribution",
        ),
        (lambda: cliques.greedy_swap(np.ones(5), 2), r"shape \[nodes, classes\], not \(5,\)"),
        (lambda: cliques.greedy_swap(np.ones((5, 2)), 2), "row 0 of label_distribution.*is not a distribution"),
        (lambda: cliques.greedy_swap(np.full((5, 2), np.nan), 2), "row 0 of label_distribution.*is not a distribution"),
        (lambda: cliques.skew([0, 0, 2], np.eye(3)), r"without gaps, not \[0, 2\]"),
        (lambda: cliques.skew([0, 0, 10**12], np.eye(3)), "without gaps"),
        (lambda: cliques.skew([0, 0], np.eye(3)), "one integer for each of 3 nodes"),
        (lambda: cliques.ideal_cliques([[0.5, 0.5], [1, 0]]), "node 0 holds 2.*partitions.one_class"),
        (lambda: cliques.ideal_cliques([[1, 0], [1, 0], [0, 1]]), r"same number of nodes, but they are on \[2, 1\]"),
    ],
)
def test_impossible_cliques_are_refused(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_greedy_swap_beats_random_cliques_on_ragged_data():
    p = partitions.dirichlet(datasets.synthetic(), 50, alpha=0.3).label_distribution
    random, swapped = cliques.random_cliques(50, 10), cliques.greedy_swap(p, 10)
    assert cliques.skew(swapped, p).mean() < cliques.skew(random, p).mean() / 3
