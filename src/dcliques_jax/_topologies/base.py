"""Base-(k+1) graphs (Takezawa et al. 2023, arXiv:2305.11420): sequences that reach the exact mean of any n nodes.

A round is a list of meetings `(pairs [meetings, 2], weight)`: the two nodes of a pair give each other this weight, and
keep the rest of 1. The building blocks `hyper_hypercube`, `simple_base` and `base` return rounds for an array of nodes.
"""

import functools
import itertools

import numpy as np

from dcliques_jax import _checks, _random
from dcliques_jax._topologies.matrices import from_pairs
from dcliques_jax._topologies.moving import from_matrices
from dcliques_jax._topologies.topology import Topology

Meetings = list[tuple[np.ndarray, float]]
Factors = tuple[int, ...]


def base_graph(num_nodes: int, degree: int, *, seed: int = 0) -> Topology:
    """Makes the Base-(k+1) sequence (Takezawa et al. 2023, arXiv:2305.11420), with k = `degree`.

    The product of the matrices of one period is exactly 11^T/n for every n: all nodes then hold the mean. Every matrix
    is symmetric and doubly stochastic, with at most k neighbours per node. The period has at most
    2 log_(k+1)(n) + 2 rounds.

    If all prime factors of n are at most k + 1, n = f_1 f_2 .. f_L with factors f_l <= k + 1 and the fewest of them.
    Round l averages groups of f_l nodes whose numbers agree in all digits but the l-th. Other n are cut into blocks by
    their digits in base k + 1. Each block reaches its own mean, hands it over to the blocks that follow, and evens out
    what it received.

    Args:
      num_nodes: number of nodes n. They stand in random order.
      degree: largest number k of neighbours in a round, at least 1.
      seed: seed of the order.

    >>> base_graph(100, 1)
    Topology('Base-2 graph', num_nodes=100, edges=340, matrices=11)
    >>> product = np.linalg.multi_dot([matrix.toarray() for matrix in base_graph(100, 1).matrices])
    >>> float(abs(product - 1 / 100).max()) < 1e-14
    True
    """
    num_nodes = _checks.integer("num_nodes", num_nodes, 1)
    degree = _checks.integer("degree", degree, 1)
    order = _random.generator(seed).permutation(num_nodes)
    matrices = []
    for meetings in base(order, degree + 1) or [[]]:
        pairs = np.concatenate([np.empty((0, 2), np.int64), *(pairs for pairs, _ in meetings)])
        weights = np.repeat([weight for _, weight in meetings], [len(pairs) for pairs, _ in meetings])
        matrices.append(from_pairs(num_nodes, pairs, weights))
    return from_matrices(matrices, name=f"Base-{degree + 1} graph")


def base(nodes: np.ndarray, most: int) -> list[Meetings]:
    """Averages nodes exactly in meetings of at most `most` nodes.

    n = p q, where p has no prime factor above `most`. Groups of q nodes average side by side, then the j-th nodes of
    all groups. The simple sequence is used if it is shorter.
    """
    p = _smooth_part(len(nodes), most)
    q = len(nodes) // p
    simple = simple_base(nodes, most)
    if p == 1 or q == 1:
        return simple
    groups = nodes.reshape(p, q)
    rounds = _side_by_side([simple_base(group, most) for group in groups])
    rounds += _side_by_side([hyper_hypercube(column, most) for column in groups.T])
    return simple if len(simple) < len(rounds) else rounds


def simple_base(nodes: np.ndarray, most: int) -> list[Meetings]:
    """Averages nodes exactly: the Simple Base-(k+1) graph. Blocks follow the digits of their number in base `most`."""
    if factorisation(len(nodes), most) is not None:
        return hyper_hypercube(nodes, most)
    blocks = _blocks(nodes, most)
    alone = [hyper_hypercube(parts.ravel(), most) for parts in blocks]
    first = [[_turn(rounds, number) for rounds in alone] for number in range(len(alone[0]))]
    second = [_second_phase(blocks, step, most) for step in range(len(hyper_hypercube(blocks[0][0], most)) + 1)]
    return [list(itertools.chain(*parts)) for parts in first + second]


def _second_phase(blocks: list[np.ndarray], step: int, most: int) -> list[Meetings]:
    """Makes a round in which block number `step` hands its mean over to all later blocks.

    Earlier blocks, and all blocks after the last step, even out what they received inside each of their parts.
    """
    if step >= len(blocks) - 1:
        return [_inside(parts, step - min(number + 1, len(blocks) - 1), most) for number, parts in enumerate(blocks)]
    earlier = [_inside(parts, step - number - 1, most) for number, parts in enumerate(blocks[:step])]
    return [*earlier, _hand_over(blocks[step], np.concatenate([parts.ravel() for parts in blocks[step + 1 :]]), most)]


def _hand_over(parts: np.ndarray, rest: np.ndarray, most: int) -> Meetings:
    """Lets the c-th node of the rest meet the c-th node of every part. The part's other nodes average in groups.

    Afterwards each part, and the rest, has the mean of both together as its mean.
    """
    weight = parts.size / (parts.size + len(rest))
    met, idle = parts[:, : len(rest)], parts[:, len(rest) :].ravel()
    pairs = np.stack([np.broadcast_to(rest, met.shape).ravel(), met.ravel()], axis=1)
    whole = len(idle) // most * most
    # Idle nodes hold equal values if nothing else happens between rounds. Training profits from their averages.
    groups = [idle[:whole].reshape(-1, most), idle[None, whole:]]
    return [(pairs, weight / len(parts)), *(_average(group) for group in groups if group.size)]


def _inside(parts: np.ndarray, number: int, most: int) -> Meetings:
    """Makes round `number`, cyclically, of the averages inside each part; of the whole block if parts are nodes."""
    chosen = parts.T if parts.shape[1] == 1 else parts
    return list(itertools.chain(*(_turn(hyper_hypercube(part, most), number) for part in chosen)))


def hyper_hypercube(nodes: np.ndarray, most: int) -> list[Meetings]:
    """Averages nodes exactly: the k-peer Hyper-Hypercube graph.

    The number of nodes must have no prime factor above `most`. Round l averages the groups of nodes whose numbers agree
    in all mixed-radix digits but the l-th.
    """
    factors = factorisation(len(nodes), most)
    assert factors is not None
    rounds, stride = [], 1
    for factor in factors:
        groups = nodes.reshape(-1, factor, stride).swapaxes(1, 2).reshape(-1, factor)
        rounds.append([_average(groups)])
        stride *= factor
    return rounds


@functools.cache
def factorisation(number: int, most: int) -> Factors | None:
    """Writes a number as the product of the fewest factors up to `most`, in ascending order; None if there is none.

    Of several products of the fewest factors, it returns one with the smallest sum, which takes the fewest messages.

    >>> factorisation(216, 8), factorisation(14, 3)
    ((6, 6, 6), None)
    """
    if number <= most:
        return (number,) if number > 1 else ()
    found = [
        tuple(sorted((factor, *rest)))
        for factor in range(2, most + 1)
        if number % factor == 0 and (rest := factorisation(number // factor, most)) is not None
    ]
    return min(found, key=lambda factors: (len(factors), sum(factors), factors), default=None)


def _smooth_part(number: int, most: int) -> int:
    """Finds the largest divisor of a number that has no prime factor above `most`."""
    part = 1
    for factor in range(2, min(number, most) + 1):
        while number % factor == 0:
            number, part = number // factor, part * factor
    return part


def _blocks(nodes: np.ndarray, most: int) -> list[np.ndarray]:
    """Cuts nodes into blocks `[a, most^p]`, one for each digit a > 0 of their number in base `most`, largest first."""
    size = 1
    while size * most <= len(nodes):
        size *= most
    blocks, start = [], 0
    while start < len(nodes):
        parts = (len(nodes) - start) // size
        if parts:
            blocks.append(nodes[start : start + parts * size].reshape(parts, size))
        start, size = start + parts * size, size // most
    return blocks


def _average(groups: np.ndarray) -> tuple[np.ndarray, float]:
    """Averages groups of nodes `[groups, size]`: all pairs of a group meet."""
    i, j = np.triu_indices(groups.shape[1], 1)
    return np.stack([groups[:, i], groups[:, j]], axis=-1).reshape(-1, 2), 1 / groups.shape[1]


def _turn(rounds: list[Meetings], number: int) -> Meetings:
    return rounds[number % len(rounds)] if rounds else []


def _side_by_side(sequences: list[list[Meetings]]) -> list[Meetings]:
    """Joins sequences of one length over different nodes, round by round."""
    return [list(itertools.chain(*meetings)) for meetings in zip(*sequences, strict=True)]
