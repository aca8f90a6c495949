"""How cliques are joined.

A wiring takes the members of every clique and returns edges `[edges, 2]` between nodes of different cliques. Which node
of a clique takes an edge is left to chance among those that have the fewest so far: it keeps degrees even, and
mixes better than any fixed choice.
"""

from collections.abc import Callable, Sequence

import numpy as np

Members = Sequence[np.ndarray]  # nodes of each clique


def _ring_inter(members: Members, rng: np.random.Generator) -> np.ndarray:
    """Each clique is linked to the next, by another node than the one that links it to the previous."""
    k = len(members)
    pairs = np.stack([np.arange(k), (np.arange(k) + 1) % k], axis=1)[: k if k > 1 else 0]
    return _link(members, pairs, _no_load(members), rng)


def _fully_connected_inter(members: Members, rng: np.random.Generator) -> np.ndarray:
    """One edge for every pair of cliques."""
    pairs = np.stack(np.triu_indices(len(members), 1), axis=1)
    return _link(members, pairs, _no_load(members), rng)


def _small_world_inter(members: Members, rng: np.random.Generator) -> np.ndarray:
    """Cliques on a ring, with fingers at exponentially growing distances in both directions (Algorithm 4).

    The largest offset is 2^(ceil(log2 k) - 1) for k cliques. The printed algorithm has one octave more, which
    contradicts the 14.5 edges per node that the paper counts at 1000 nodes.
    """
    k = len(members)
    octaves = 2 ** np.arange(int(k - 1).bit_length())  # 1, 2, 4 .. ; bit_length(k - 1) = ceil(log2 k)
    offsets = (octaves[:, None] + np.arange(2)).ravel()  # two cliques at each distance, the paper's ns
    offsets = np.concatenate([offsets, -offsets])
    start = np.repeat(np.arange(k), len(offsets))
    pairs = np.stack([start, (start + np.tile(offsets, k)) % k], axis=1)
    return _link(members, pairs[pairs[:, 0] != pairs[:, 1]], _no_load(members), rng)


def _fractal_inter(members: Members, rng: np.random.Generator) -> np.ndarray:
    """Groups of M cliques with one edge per pair of cliques, groups of M groups with one per pair, and so on."""
    size = max(2, *(len(nodes) for nodes in members))
    load = _no_load(members)
    edges = [np.empty((0, 2), np.int64)]
    groups = list(members)
    while len(groups) > 1:
        batches = [groups[start : start + size] for start in range(0, len(groups), size)]
        for batch in batches:
            edges.append(_link(batch, np.stack(np.triu_indices(len(batch), 1), axis=1), load, rng))
        groups = [np.concatenate(batch) for batch in batches]
    return np.concatenate(edges)


INTER: dict[str, Callable[[Members, np.random.Generator], np.ndarray]] = {
    "ring": _ring_inter,
    "fractal": _fractal_inter,
    "small_world": _small_world_inter,
    "fully_connected": _fully_connected_inter,
}


def _no_load(members: Members) -> np.ndarray:
    return np.zeros(sum(len(nodes) for nodes in members), np.int64)


def _link(groups: Members, pairs: np.ndarray, load: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One edge for each pair of groups, between least-loaded nodes; counts the edges in `load` [nodes]."""
    ends = np.empty(pairs.size, np.int64)
    counts = np.bincount(pairs.ravel(), minlength=len(groups))
    slots = np.split(np.argsort(pairs, axis=None, kind="stable"), np.cumsum(counts)[:-1])
    for nodes, slot in zip(groups, slots, strict=True):
        ends[slot] = _least_loaded(nodes, load, len(slot), rng)
    return ends.reshape(-1, 2)


def _least_loaded(nodes: np.ndarray, load: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """The nodes that `count` picks in a row take, each a random one of the least loaded; updates `load`.

    A node of load l can be picked as the (l+1)-th, (l+2)-th, .. edge of its own. Picks go through all such offers
    level by level and at random inside a level, so that one sort replaces the loop.
    """
    current = load[nodes]
    turns = np.ptp(current) + -(-count // len(nodes))
    offers = current + np.arange(turns)[:, None]  # [turns, nodes]
    order = np.argsort(offers + rng.random(offers.shape), axis=None)[:count]
    picked = nodes[order % len(nodes)]
    np.add.at(load, picked, 1)
    return picked
