"""Which node joins which clique.

A set of cliques is an integer array `clique_ids` of shape [nodes]: nodes with the same id form a clique.
Ids run from 0 to the number of cliques minus one.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dcliques_jax import _checks, _random

# Cliques up to which Greedy Swap makes its steps one after another, and the paper's number of them.
_MOST_IN_TURN = 100
_AT_ONCE = 2**16  # numbers in the arrays of a batch, over its steps, their exchanges and classes


def skew(clique_ids: npt.ArrayLike, label_distribution: npt.ArrayLike) -> np.ndarray:
    """The skew of each clique (eq. 3): how far its label distribution is from the global one.

        skew(C) = sum_l | p_C(y = l) - p(y = l) |,   p_C = mean of p_i over C,   p = mean of p_i over all nodes

    Returns an array [cliques] with values in [0, 2].

    >>> skew([0, 0, 1, 1], [[1, 0], [1, 0], [0, 1], [0, 1]])
    array([1., 1.])
    >>> skew([0, 1, 1, 0], [[1, 0], [1, 0], [0, 1], [0, 1]])
    array([0., 0.])
    """
    p = check_label_distribution(label_distribution)
    ids = check_clique_ids(clique_ids, len(p))
    sums = np.zeros((ids.max() + 1, p.shape[1]))
    np.add.at(sums, ids, p)
    means = sums / np.bincount(ids)[:, None]
    distances: np.ndarray = np.abs(means - p.mean(axis=0)).sum(axis=1)
    return distances


def members(clique_ids: np.ndarray) -> list[np.ndarray]:
    """The nodes of each clique, in order.

    >>> members(np.array([1, 0, 1]))
    [array([1]), array([0, 2])]
    """
    return np.split(np.argsort(clique_ids, kind="stable"), np.cumsum(np.bincount(clique_ids))[:-1])


def random_cliques(num_nodes: int, clique_size: int, *, seed: int = 0) -> np.ndarray:
    """Cliques of `clique_size` random nodes; the last one takes the remainder.

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
    """Greedy Swap (Algorithm 2): random cliques, improved by exchanging nodes.

    Each step takes two random cliques and, uniformly among all exchanges of one node for one node that strictly
    lower skew(C1) + skew(C2), makes one. Sizes never change and the total skew never rises. `skew_trajectory`
    shows the way there.

    Steps that share no clique do not touch each other. With more than 100 cliques such steps are made at once, and each
    still after all earlier ones that it shares a clique with: it is the same algorithm, a hundred thousand nodes take
    seconds, and only the random numbers that choose an exchange are drawn in another way.

    Args:
      label_distribution: p_i(y) of every node, `[nodes, classes]`.
      clique_size: size M of the cliques; the last one takes the remainder.
      max_steps: number K of steps. By default the paper's 1000; they would leave thousands of cliques close to random
        ones, and so with more than 100 cliques it is 100 for every clique, as the paper's are for its ten.
      seed: of the random cliques and of the steps.

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
    """The mean clique skew after 0, 1, ..., `max_steps` steps of `greedy_swap` with the same arguments.

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
    p = check_label_distribution(label_distribution)
    ids = random_cliques(len(p), clique_size, seed=seed)
    num_cliques = int(ids.max()) + 1
    many = num_cliques > _MOST_IN_TURN
    if max_steps is None:
        max_steps = 100 * num_cliques if many else 1000
    max_steps = _checks.integer("max_steps", max_steps, 0)
    if num_cliques == 1:
        return ids, np.full(max_steps + 1, skew(ids, p).mean())

    # Streams of their own (`seed` alone drew the random cliques), so that more steps go on where fewer stopped.
    pair_rng, swap_rng = _random.generator(seed, 1), _random.generator(seed, 2)
    pairs = pair_rng.integers([num_cliques, num_cliques - 1], size=(max_steps, 2))
    pairs[:, 1] += pairs[:, 1] >= pairs[:, 0]  # the second of all cliques but the first
    order = np.argsort(ids, kind="stable")  # nodes clique by clique, which exchanges keep: M places for each clique
    deviation = p - p.mean(axis=0)  # the skew of a clique is the 1-norm of the mean of these
    swap = _swap_at_once if many else _swap_in_turn
    changes = swap(order, deviation, pairs, clique_size, swap_rng)
    start = skew(ids, p).sum()
    ids[order] = np.arange(len(p)) // clique_size
    return ids, (start + np.concatenate([[0.0], np.cumsum(changes)])) / num_cliques


def _swap_in_turn(
    order: np.ndarray, deviation: np.ndarray, pairs: np.ndarray, clique_size: int, rng: np.random.Generator
) -> np.ndarray:
    """Steps one after another; exchanges nodes in `order` and returns the change of the total skew, [steps]."""
    changes = np.zeros(len(pairs))
    for step, (a, b) in enumerate(pairs * clique_size):
        before, after = _skews(deviation[order[a : a + clique_size]], deviation[order[b : b + clique_size]])
        better = np.argwhere(after < before)
        if len(better):
            i, j = better[rng.integers(len(better))]
            order[a + i], order[b + j] = order[b + j], order[a + i]
            changes[step] = after[i, j] - before
    return changes


def _swap_at_once(
    order: np.ndarray, deviation: np.ndarray, pairs: np.ndarray, clique_size: int, rng: np.random.Generator
) -> np.ndarray:
    """What `_swap_in_turn` does, with steps that share no clique made together."""
    changes, draws = np.zeros(len(pairs)), rng.random(len(pairs))
    sizes = np.minimum(clique_size, len(order) - pairs * clique_size)  # [steps, 2]
    for steps in _batches(_rounds(pairs), sizes, deviation.shape[1]):
        places_a, places_b = (
            clique[:, None] * clique_size + np.arange(size)
            for clique, size in zip(pairs[steps].T, sizes[steps[0]], strict=True)
        )  # [steps, a], [steps, b]
        before, after = _skews(deviation[order[places_a]], deviation[order[places_b]])
        after = after.reshape(len(steps), -1)  # [steps, exchanges]
        better, exchange = np.nonzero(after < before[:, None])  # all that lower the skew, step by step
        count = np.bincount(better, minlength=len(steps))
        found = np.flatnonzero(count)  # steps that have such exchanges
        nth = np.cumsum(count) - count + (draws[steps] * count).astype(np.int64)
        chosen = exchange[nth[found]]
        i, j = np.divmod(chosen, places_b.shape[1])
        at_a, at_b = places_a[found, i], places_b[found, j]
        order[at_a], order[at_b] = order[at_b], order[at_a]
        changes[steps[found]] = after[found, chosen] - before[found]
    return changes


def _skews(of_a: np.ndarray, of_b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """skew(C1) + skew(C2) as it is, [...], and after every exchange, [..., a, b].

    From the deviations of members, [..., a, classes] and [..., b, classes]. The two are compared without a tolerance,
    as the paper's pseudo-code reads: rounding lets some exchanges of equal skew through, which leads off plateaus. With
    a tolerance CIFAR-10 ends at a mean skew of 0.018 instead of 0.009. So the order of sums matters, which is the same
    for one step and for many.
    """
    a, b = of_a.shape[-2], of_b.shape[-2]
    mean_a, mean_b = of_a.mean(axis=-2, keepdims=True), of_b.mean(axis=-2, keepdims=True)
    gain = of_b[..., None, :, :] - of_a[..., :, None, :]  # what clique a gains by an exchange, and b loses
    skew_a = np.abs(mean_a[..., None, :] + gain / a).sum(axis=-1)
    skew_b = np.abs(mean_b[..., None, :] - gain / b).sum(axis=-1)
    return (np.abs(mean_a).sum(axis=-1) + np.abs(mean_b).sum(axis=-1))[..., 0], skew_a + skew_b


def _rounds(pairs: np.ndarray) -> np.ndarray:
    """The round [steps] in which each step can be made: the first after all earlier steps with either of its cliques.

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
    """Steps of one round between cliques of the same two sizes [steps, 2], few enough to stay in the cache."""
    keys = np.column_stack([rounds, sizes])
    steps = np.lexsort(keys.T[::-1])
    starts = np.flatnonzero((np.diff(keys[steps], axis=0, prepend=-1) != 0).any(axis=1))
    for alike in np.split(steps, starts)[1:]:
        most = max(1, _AT_ONCE // (int(sizes[alike[0]].prod()) * num_classes))
        yield from np.split(alike, range(most, len(alike), most))


def ideal_cliques(label_distribution: npt.ArrayLike, *, seed: int = 0) -> np.ndarray:
    """Cliques of zero skew (Algorithm 5): every clique takes one random node of each class.

    Needs the assumptions of the paper's appendix C: every node holds a single class and every class is on the same
    number of nodes. `greedy_swap` takes any distribution.

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
    """The one class of each node, [nodes]; an error unless all classes are on the same number of nodes."""
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
    """The distributions p_i(y) as float64 [nodes, classes], or an error that says what is wrong with them."""
    if hasattr(label_distribution, "label_distribution"):
        raise ValueError(f"{label_distribution!r} is no label distribution: pass its .label_distribution")
    p = np.asarray(label_distribution, np.float64)
    if p.ndim != 2 or 0 in p.shape:
        raise ValueError(f"label_distribution must have shape [nodes, classes], not {p.shape}")
    wrong = np.flatnonzero(~(np.isfinite(p).all(axis=1) & (p >= 0).all(axis=1) & np.isclose(p.sum(axis=1), 1)))
    if len(wrong):
        raise ValueError(
            f"row {wrong[0]} of label_distribution, {p[wrong[0]].tolist()}, is no distribution: it must be "
            "non-negative and sum to 1"
        )
    return p


def check_clique_ids(clique_ids: npt.ArrayLike, num_nodes: int) -> np.ndarray:
    """The clique of each node as int64 [nodes], or an error; ids must be 0 .. cliques - 1, none left out."""
    ids = np.asarray(clique_ids)
    if ids.shape != (num_nodes,) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"clique_ids must be one integer for each of {num_nodes} nodes, not {ids.dtype} of shape {ids.shape}"
        )
    if ids.min() < 0 or ids.max() >= num_nodes or not np.bincount(ids.astype(np.int64)).all():
        raise ValueError(f"clique_ids must be 0 .. cliques - 1 with none left out, not {np.unique(ids).tolist()}")
    return ids.astype(np.int64)
