"""Cliques that somebody builds who knows all label distributions."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dcliques_jax import _checks, _random

# Up to this many cliques, Greedy Swap takes its steps one after another, 1000 of them as in the paper.
_MOST_IN_TURN = 100
_AT_ONCE = 2**16  # numbers in the arrays of a batch: steps x exchanges x classes


def skew(clique_ids: npt.ArrayLike, label_distribution: npt.ArrayLike) -> np.ndarray:
    """Computes the skew of each clique (eq. 3): the distance of its label distribution from the global one.

        skew(C) = sum_l | p_C(y = l) - p(y = l) |,   p_C = mean of p_i over C,   p = mean of p_i over all nodes

    Args:
      clique_ids: the clique of each node, `[nodes]`.
      label_distribution: p_i(y) of every node, `[nodes, classes]`, or any other means, as in `greedy_swap`.

    Returns:
      An array `[cliques]`, for label distributions with values in [0, 2].

    >>> skew([0, 0, 1, 1], [[1, 0], [1, 0], [0, 1], [0, 1]])
    array([1., 1.])
    >>> skew([0, 1, 1, 0], [[1, 0], [1, 0], [0, 1], [0, 1]])
    array([0., 0.])
    """
    p = check_means(label_distribution)
    ids = check_clique_ids(clique_ids, len(p))
    sums = np.zeros((ids.max() + 1, p.shape[1]))
    np.add.at(sums, ids, p)
    means = sums / np.bincount(ids)[:, None]
    distances: np.ndarray = np.abs(means - p.mean(axis=0)).sum(axis=1)
    return distances


def members(clique_ids: np.ndarray) -> list[np.ndarray]:
    """Lists the nodes of each clique, in order.

    >>> members(np.array([1, 0, 1]))
    [array([1]), array([0, 2])]
    """
    return np.split(np.argsort(clique_ids, kind="stable"), np.cumsum(np.bincount(clique_ids))[:-1])


def random_cliques(num_nodes: int, clique_size: int, *, seed: int = 0) -> np.ndarray:
    """Makes cliques of random nodes.

    Args:
      num_nodes: number of nodes.
      clique_size: number of nodes per clique. The last clique takes the remainder.
      seed: seed of the choice.

    Returns:
      The clique ids `[nodes]`.

    >>> np.bincount(random_cliques(25, 10, seed=0))
    array([10, 10,  5])
    """
    num_nodes = _checks.integer("num_nodes", num_nodes, 1)
    clique_size = _checks.integer("clique_size", clique_size, 1, num_nodes, "the number of nodes")
    ids = np.empty(num_nodes, np.int64)
    ids[_random.generator(seed).permutation(num_nodes)] = np.arange(num_nodes) // clique_size
    return ids


def greedy_swap(
    label_distribution: npt.ArrayLike, clique_size: int, *, max_steps: int | None = None, seed: int = 0
) -> np.ndarray:
    """Runs Greedy Swap (Algorithm 2): starts with random cliques and exchanges nodes to lower their skew.

    Each step picks two random cliques. Among all exchanges of two nodes that strictly lower skew(C1) + skew(C2), it
    makes one at random. Sizes never change and the total skew never rises. `skew_trajectory` returns the skew after
    every step.

    With more than 100 cliques, steps that share no clique run together, each still after all earlier steps that it
    shares a clique with. The algorithm is the same, and a hundred thousand nodes take seconds. Only the random numbers
    that choose an exchange are drawn in another way.

    Args:
      label_distribution: p_i(y) of every node, `[nodes, classes]`. Rows may also be means of other features of a node's
        examples, such as those of `dcliques_jax.features`; cliques then represent their global mean. Whole numbers are
        taken for counts and refused.
      clique_size: size M of the cliques. The last clique takes the remainder.
      max_steps: number K of steps. Defaults to the paper's 1000, and to 100 per clique with more than 100 cliques: as
        many per clique as in the paper, which has ten.
      seed: seed of the random cliques and of the steps.

    Returns:
      The clique ids `[nodes]`.

    >>> from dcliques_jax import datasets, partitions
    >>> data = partitions.shards(datasets.synthetic(num_train=2000), 100, seed=1)
    >>> ids = greedy_swap(data.label_distribution, 10, seed=1)
    >>> bool(skew(ids, data.label_distribution).mean() < 0.05)
    True
    """
    return _greedy_swap(label_distribution, clique_size, max_steps, seed)[0]


def skew_trajectory(
    label_distribution: npt.ArrayLike, clique_size: int, *, max_steps: int | None = None, seed: int = 0
) -> np.ndarray:
    """Computes the mean clique skew after 0, 1, ..., `max_steps` steps, `[max_steps + 1]`.

    The arguments are those of `greedy_swap`.

    >>> from dcliques_jax import datasets, partitions
    >>> data = partitions.shards(datasets.synthetic(num_train=2000), 100, seed=1)
    >>> trajectory = skew_trajectory(data.label_distribution, 10, max_steps=200, seed=1)
    >>> trajectory.shape, bool((np.diff(trajectory) < 1e-12).all())
    ((201,), True)
    """
    return _greedy_swap(label_distribution, clique_size, max_steps, seed)[1]


def _greedy_swap(
    label_distribution: npt.ArrayLike, clique_size: int, max_steps: int | None, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    p = check_means(label_distribution)
    ids = random_cliques(len(p), clique_size, seed=seed)
    num_cliques = int(ids.max()) + 1
    many = num_cliques > _MOST_IN_TURN
    if max_steps is None:
        max_steps = 100 * num_cliques if many else 1000
    max_steps = _checks.integer("max_steps", max_steps, 0)
    if num_cliques == 1:
        return ids, np.full(max_steps + 1, skew(ids, p).mean())

    # Separate streams, other than that of the random cliques: a larger max_steps continues a smaller one.
    pair_rng, swap_rng = _random.generator(seed, 1), _random.generator(seed, 2)
    pairs = pair_rng.integers([num_cliques, num_cliques - 1], size=(max_steps, 2))
    pairs[:, 1] += pairs[:, 1] >= pairs[:, 0]  # any clique but the first of the pair
    order = np.argsort(ids, kind="stable")  # nodes clique by clique; exchanges keep M slots per clique
    deviation = p - p.mean(axis=0)  # the skew of a clique is the 1-norm of its mean deviation
    swap = _swap_at_once if many else _swap_in_turn
    changes = swap(order, deviation, pairs, clique_size, swap_rng)
    start = skew(ids, p).sum()
    ids[order] = np.arange(len(p)) // clique_size
    return ids, (start + np.concatenate([[0.0], np.cumsum(changes)])) / num_cliques


def _swap_in_turn(
    order: np.ndarray, deviation: np.ndarray, pairs: np.ndarray, clique_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Takes steps one after another. Exchanges nodes in `order` and returns the changes of the total skew, [steps]."""
    changes = np.zeros(len(pairs))
    for step, (a, b) in enumerate(pairs * clique_size):
        before, after = exchange_skews(deviation[order[a : a + clique_size]], deviation[order[b : b + clique_size]])
        better = np.argwhere(after < before)
        if len(better):
            i, j = better[rng.integers(len(better))]
            order[a + i], order[b + j] = order[b + j], order[a + i]
            changes[step] = after[i, j] - before
    return changes


def _swap_at_once(
    order: np.ndarray, deviation: np.ndarray, pairs: np.ndarray, clique_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Does what `_swap_in_turn` does; takes steps that share no clique together."""
    changes, draws = np.zeros(len(pairs)), rng.random(len(pairs))
    sizes = np.minimum(clique_size, len(order) - pairs * clique_size)  # [steps, 2]
    for steps in _batches(_rounds(pairs), sizes, deviation.shape[1]):
        slots_a, slots_b = (
            clique[:, None] * clique_size + np.arange(size)
            for clique, size in zip(pairs[steps].T, sizes[steps[0]], strict=True)
        )  # [steps, a], [steps, b]
        before, after = exchange_skews(deviation[order[slots_a]], deviation[order[slots_b]])
        after = after.reshape(len(steps), -1)  # [steps, exchanges]
        better, exchange = np.nonzero(after < before[:, None])  # exchanges that lower the skew, step by step
        count = np.bincount(better, minlength=len(steps))
        found = np.flatnonzero(count)  # steps that have such exchanges
        nth = np.cumsum(count) - count + (draws[steps] * count).astype(np.int64)
        chosen = exchange[nth[found]]
        i, j = np.divmod(chosen, slots_b.shape[1])
        at_a, at_b = slots_a[found, i], slots_b[found, j]
        order[at_a], order[at_b] = order[at_b], order[at_a]
        changes[steps[found]] = after[found, chosen] - before[found]
    return changes


def exchange_skews(of_a: np.ndarray, of_b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes skew(C1) + skew(C2) before, [...], and after every exchange, [..., a, b].

    The arguments are the deviations of members, [..., a, classes] and [..., b, classes]. `greedy_swap` compares both
    results without a tolerance, as in the paper's pseudo-code. Rounding then lets some exchanges of equal skew through,
    which leads off plateaus: with a tolerance CIFAR-10 ends at a mean skew of 0.018 instead of 0.009. The order of sums
    therefore matters. It is the same for one step and for many.
    """
    a, b = of_a.shape[-2], of_b.shape[-2]
    mean_a, mean_b = of_a.mean(axis=-2, keepdims=True), of_b.mean(axis=-2, keepdims=True)
    gain = of_b[..., None, :, :] - of_a[..., :, None, :]  # what clique a gains and b loses by an exchange
    skew_a = np.abs(mean_a[..., None, :] + gain / a).sum(axis=-1)
    skew_b = np.abs(mean_b[..., None, :] - gain / b).sum(axis=-1)
    return (np.abs(mean_a).sum(axis=-1) + np.abs(mean_b).sum(axis=-1))[..., 0], skew_a + skew_b


def _rounds(pairs: np.ndarray) -> np.ndarray:
    """Finds the round [steps] of each step: the first after all earlier steps with either of its cliques.

    >>> _rounds(np.array([[0, 1], [2, 3], [1, 2], [0, 4]]))
    array([1, 1, 2, 2])
    """
    busy = [0] * (int(pairs.max(initial=0)) + 1)  # last round of each clique so far
    rounds = []
    for a, b in zip(*pairs.T.tolist(), strict=True):
        busy[a] = busy[b] = max(busy[a], busy[b]) + 1
        rounds.append(busy[a])
    return np.array(rounds, np.int64)


def _batches(rounds: np.ndarray, sizes: np.ndarray, num_classes: int) -> Iterator[np.ndarray]:
    """Yields steps of one round between cliques of the same two sizes, few enough to stay in the cache."""
    keys = np.column_stack([rounds, sizes])
    steps = np.lexsort(keys.T[::-1])
    starts = np.flatnonzero((np.diff(keys[steps], axis=0, prepend=-1) != 0).any(axis=1))
    for alike in np.split(steps, starts)[1:]:
        most = max(1, _AT_ONCE // (int(sizes[alike[0]].prod()) * num_classes))
        yield from np.split(alike, range(most, len(alike), most))


def ideal_cliques(label_distribution: npt.ArrayLike, *, seed: int = 0) -> np.ndarray:
    """Makes cliques of zero skew (Algorithm 5): every clique takes one random node of each class.

    The assumptions of the paper's appendix C must hold: every node has one class, and every class is on the same number
    of nodes. `greedy_swap` accepts any distribution.

    Args:
      label_distribution: p_i(y) of every node, `[nodes, classes]`.
      seed: seed of the choice of nodes.

    Returns:
      The clique ids `[nodes]`.

    >>> ideal_cliques([[1, 0], [1, 0], [0, 1], [0, 1]], seed=1)
    array([0, 1, 0, 1])
    """
    p = check_label_distribution(label_distribution)
    classes = single_classes(p, "ideal_cliques")
    by_class = _random.generator(seed).permutation(len(p))
    by_class = by_class[np.argsort(classes[by_class], kind="stable")]
    ids = np.empty(len(p), np.int64)
    ids[by_class] = np.arange(len(p)) % np.bincount(classes).max()
    return ids


def single_classes(p: np.ndarray, caller: str) -> np.ndarray:
    """Returns the one class of each node, [nodes]; all classes must be on the same number of nodes."""
    mixed = np.flatnonzero((p > 0).sum(axis=1) != 1)
    if len(mixed):
        raise ValueError(
            f"{caller} needs nodes that hold one class each, but node {mixed[0]} holds {(p[mixed[0]] > 0).sum()}: "
            "partition with partitions.one_class, or use cliques.greedy_swap"
        )
    classes = p.argmax(axis=1)
    counts = np.bincount(classes)
    if len(set(counts[counts > 0])) > 1:
        raise ValueError(
            f"{caller} needs every class on the same number of nodes, but they are on {counts.tolist()}: partition "
            "with partitions.one_class, or use cliques.greedy_swap"
        )
    return classes


def check_label_distribution(label_distribution: npt.ArrayLike) -> np.ndarray:
    """Returns the distributions p_i(y) as float64 `[nodes, classes]`, or raises a `ValueError`."""
    if hasattr(label_distribution, "label_distribution"):
        raise ValueError(f"{label_distribution!r} is not a label distribution: pass its .label_distribution")
    p = np.asarray(label_distribution, np.float64)
    if p.ndim != 2 or 0 in p.shape:
        raise ValueError(f"label_distribution must have shape [nodes, classes], not {p.shape}")
    wrong = np.flatnonzero(~(np.isfinite(p).all(axis=1) & (p >= 0).all(axis=1) & np.isclose(p.sum(axis=1), 1)))
    if len(wrong):
        raise ValueError(
            f"row {wrong[0]} of label_distribution, {p[wrong[0]].tolist()}, is not a distribution: it must be "
            "non-negative and sum to 1; divide counts by the number of examples"
        )
    return p


def check_means(rows: npt.ArrayLike) -> np.ndarray:
    """Returns label distributions, or other finite means `[nodes, features]`, as float64, or raises a `ValueError`.

    Whole numbers that are not distributions are refused: they are counts, of which a clique would need the mean.
    """
    if hasattr(rows, "label_distribution"):
        return check_label_distribution(rows)
    means = np.asarray(rows, np.float64)
    usable = means.ndim == 2 and 0 not in means.shape and np.isfinite(means).all() and (means != np.rint(means)).any()
    return means if usable else check_label_distribution(means)


def check_clique_ids(clique_ids: npt.ArrayLike, num_nodes: int) -> np.ndarray:
    """Returns the clique of each node as int64 `[nodes]`; ids must be 0 .. cliques - 1, without gaps."""
    ids = np.asarray(clique_ids)
    if ids.shape != (num_nodes,) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"clique_ids must be one integer for each of {num_nodes} nodes, not {ids.dtype} of shape {ids.shape}"
        )
    if ids.min() < 0 or ids.max() >= num_nodes or not np.bincount(ids.astype(np.int64)).all():
        raise ValueError(f"clique_ids must be 0 .. cliques - 1 without gaps, not {np.unique(ids).tolist()}")
    return ids.astype(np.int64)
