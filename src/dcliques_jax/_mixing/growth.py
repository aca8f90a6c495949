"""Whether D2 is stable on a matrix or a sequence of matrices."""

import functools
from typing import Any

import jax
import numpy as np
import scipy.sparse

from dcliques_jax._arrays import checksum
from dcliques_jax._mixing.forms import Identity, Weights
from dcliques_jax._mixing.groups import GroupMean
from dcliques_jax._mixing.paced import Paced
from dcliques_jax._mixing.sequences import Drawn
from dcliques_jax._mixing.spectrum import extremes, is_symmetric

_DENSE = 2000  # nodes up to which all eigenvalues of an asymmetric matrix are computed
# What was computed, by the content of the weights: every run asks twice, and large matrices take seconds.
_known: dict[tuple[Any, str], float] = {}


def d2_growth(weights: Weights) -> float:
    """Computes the factor by which differences between nodes grow per round of D2 without gradients.

    A mode of W with eigenvalue l has the factors `r = l +- sqrt(l^2 - l)`. They exceed 1 if l < -1/3. For a sequence
    of matrices, it is the spectral radius of the product of `[[W, W], [W - Q, W]]` with Q = I - J, on differences.

    >>> from dcliques_jax import topologies
    >>> round(d2_growth(topologies.ring(17).weights()), 4), round(d2_growth(topologies.grid(10, 10).weights()), 2)
    (0.9772, 1.51)
    """
    leaves, structure = jax.tree.flatten(weights)
    key = structure, checksum(*leaves)
    if key not in _known:
        _known[key] = _computed(weights)
    return _known[key]


def _computed(weights: Weights) -> float:
    base, every = (weights.base, weights.every) if isinstance(weights, Paced) else (weights, 1)
    if isinstance(base, GroupMean | Identity):
        found = np.array(extremes(base)) if isinstance(base, GroupMean) else np.ones(1)
        return 0.0 if base.num_nodes == 1 else _of_modes(_in_a_round(found, weights), every)
    if isinstance(base, Drawn):
        raise ValueError("D2 is not known to be stable on graphs that are drawn in every round: use gradient_tracking")
    matrices = weights.matrices()
    if len(matrices) == 1 and is_symmetric(matrices[0]):
        if isinstance(weights, Paced) and _bends(weights):  # the worst mode may be any
            _check_size(base)
            found = np.linalg.eigvalsh(matrices[0].toarray())[:-1]
        else:
            found = np.array(extremes(base, precise=True))
        return _of_modes(_in_a_round(found, weights), every)
    if len(matrices) == 1 and every == 1:
        _check_size(base)
        return _of_modes(_in_a_round(np.linalg.eigvals(_centred(matrices[0])), weights))
    _check_size(base)
    products: Any = [_centred(matrix) for matrix in matrices]
    if isinstance(weights, Paced):
        products = weights.over_rounds(products, lambda factors: functools.reduce(lambda a, b: b @ a, factors))
    n = base.num_nodes
    q = np.eye(n) - 1 / n
    rounds = [_round(q if product is None else product, q) for product in products]
    radius = np.abs(np.linalg.eigvals(functools.reduce(lambda a, b: b @ a, rounds))).max()
    return float(radius ** (1 / len(rounds)))


def _in_a_round(eigenvalues: np.ndarray, weights: Weights) -> np.ndarray:
    """Returns the eigenvalues of all gossips of a round together."""
    if not isinstance(weights, Paced):
        return eigenvalues
    if weights.omegas is None:
        return eigenvalues**weights.times
    before, found = np.ones_like(eigenvalues), eigenvalues
    for omega in np.asarray(weights.omegas)[0]:
        before, found = found, omega * (eigenvalues * found - before) + before
    return found


def _bends(weights: Paced) -> bool:
    """Whether eigenvalues between the extremes of W may be the worst of a round: the even powers of some are less."""
    return weights.omegas is not None or (weights.every > 1 and weights.times % 2 == 0)


def _of_modes(eigenvalues: np.ndarray, every: int = 1) -> float:
    """Returns the largest factor per round, of `[[l, l], [l - 1, l]] [[1, k - 1], [0, 1]]` if nodes gossip every k."""
    trace = (every + 1) * eigenvalues - (every - 1)
    root = np.sqrt(trace.astype(np.complex128) ** 2 - 4 * eigenvalues)
    return float(max(np.abs(trace + root).max(), np.abs(trace - root).max()) / 2) ** (1 / every)


def _round(w: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Returns the matrix of one round on models and corrections."""
    return np.block([[w, w], [w - q, w]])


def _centred(matrix: scipy.sparse.csr_array) -> np.ndarray:
    dense = matrix.toarray()
    return dense - dense.mean(axis=1, keepdims=True)  # W (I - J)


def _check_size(weights: Weights) -> None:
    if weights.num_nodes > _DENSE:
        raise ValueError(
            f"whether D2 is stable on matrices that are not symmetric or change is computed for up to {_DENSE} nodes, "
            f"not {weights.num_nodes:,}: use gradient_tracking, or a symmetric matrix"
        )
