"""How cliques are joined.

A wiring takes the members of every clique and returns edges `[edges, 2]` between nodes of different cliques. An edge
ends in a random one of the nodes of its clique that have the fewest inter-clique edges so far. This keeps degrees even
and mixes better than any fixed choice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Members = Sequence[np.ndarray]  # nodes of each clique
Wiring = Callable[[Members, np.random.Generator], Any]  # returns edges [edges, 2] between cliques


def _ring_inter(members: Members, rng: np.random.Generator) -> np.ndarray:
    """Links each clique to the next, from another node than the one that links it to the previous."""
    k = len(members)
    pairs = np.stack([np.arange(k), (np.arange(k) + 1) % k], axis=1)[: k if k > 1 else 0]
    return _link(members, pairs, _no_load(members), rng)


def _fully_connected_inter(members: Members, rng: np.random.Generator) -> np.ndarray:
    """Links every pair of cliques by one edge."""
    pairs = np.stack(np.triu_indices(len(members), 1), axis=1)
    return _link(members, pairs, _no_load(members), rng)


def _small_world_inter(members: Members, rng: np.random.Generator) -> np.ndarray:
    """Links cliques on a ring by fingers at exponentially growing distances in both directions (Algorithm 4).

    The largest offset is 2^(ceil(log2 k) - 1) for k cliques. The printed algorithm has one octave more, which
    contradicts the 14.5 edges per node that the paper counts for 1000 nodes.
    """
    k = len(members)
    octaves = 2 ** np.arange(int(k - 1).bit_length())  # 1, 2, 4 .. ; bit_length(k - 1) = ceil(log2 k)
    offsets = (octaves[:, None] + np.arange(2)).ravel()  # two cliques at each distance, the paper's ns
    offsets = np.concatenate([offsets, -offsets])
    start = np.repeat(np.arange(k), len(offsets))
    pairs = np.stack([start, (start + np.tile(offsets, k)) % k], axis=1)
    return _link(members, pairs[pairs[:, 0] != pairs[:, 1]], _no_load(members), rng)


def _fractal_inter(members: Members, rng: np.random.Generator) -> np.ndarray:
    """Links all pairs in groups of M cliques, then all pairs in groups of M groups, and so on."""
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


INTER: dict[str, Wiring] = {
    "ring": _ring_inter,
    "fractal": _fractal_inter,
    "small_world": _small_world_inter,
    "fully_connected": _fully_connected_inter,
}


def _no_load(members: Members) -> np.ndarray:
    return np.zeros(sum(len(nodes) for nodes in members), np.int64)


def _link(groups: Members, pairs: np.ndarray, load: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Makes one edge per pair of groups, between least-loaded nodes. Adds the edges to `load` [nodes]."""
    ends = np.empty(pairs.size, np.int64)
    counts = np.bincount(pairs.ravel(), minlength=len(groups))
    ends_of_group = np.split(np.argsort(pairs, axis=None, kind="stable"), np.cumsum(counts)[:-1])
    for nodes, own in zip(groups, ends_of_group, strict=True):
        ends[own] = _least_loaded(nodes, load, len(own), rng)
    return ends.reshape(-1, 2)


def _least_loaded(nodes: np.ndarray, load: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Picks `count` nodes in a row, each a random one of the least loaded, and updates `load`.

    A node of load l offers its (l+1)-th edge, then its (l+2)-th, and so on. Picks take all offers level by level, in
    random order inside a level, so one sort replaces the loop.
    """
    current = load[nodes]
    levels = np.ptp(current) + -(-count // len(nodes))
    offers = current + np.arange(levels)[:, None]  # [levels, nodes]
    order = np.argsort(offers + rng.random(offers.shape), axis=None)[:count]
    picked = nodes[order % len(nodes)]
    np.add.at(load, picked, 1)
    return picked
