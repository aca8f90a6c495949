"""Whether D2 is stable on a matrix or a sequence of matrices."""

import functools
from typing import Any

import numpy as np
import scipy.sparse

from dcliques_jax._mixing.forms import Identity, Weights
from dcliques_jax._mixing.groups import GroupMean
from dcliques_jax._mixing.paced import Paced
from dcliques_jax._mixing.sequences import Drawn
from dcliques_jax._mixing.spectrum import extremes, is_symmetric

_DENSE = 2000  # nodes up to which all eigenvalues of an asymmetric matrix are computed


def d2_growth(weights: Weights) -> float:
    """Computes the factor by which differences between nodes grow per round of D2 without gradients.

    A mode of W with eigenvalue l has the factors `r = l +- sqrt(l^2 - l)`. They exceed 1 if l < -1/3. For a sequence
    of matrices, it is the spectral radius of the product of `[[W, W], [W - Q, W]]` with Q = I - J, on differences.

    >>> from dcliques_jax import topologies
    >>> round(d2_growth(topologies.ring(17).weights()), 4), round(d2_growth(topologies.grid(10, 10).weights()), 2)
    (0.9772, 1.51)
    """
    base, times = (weights.base, weights.times) if isinstance(weights, Paced) else (weights, 1)
    if isinstance(base, GroupMean | Identity):
        return _of_modes(np.array(extremes(base)) if isinstance(base, GroupMean) else np.ones(1))
    if isinstance(base, Drawn):
        raise ValueError("D2 is not known to be stable on graphs that are drawn in every round: use gradient_tracking")
    matrices = weights.matrices()
    every = weights.every if isinstance(weights, Paced) else 1
    if len(matrices) == 1 and every == 1:
        if is_symmetric(matrices[0]):
            return _of_modes(np.array(extremes(base)) ** times)
        _check_size(base)
        return _of_modes(np.linalg.eigvals(_centred(matrices[0])) ** times)
    _check_size(base)
    products: Any = [_centred(matrix) for matrix in matrices]
    if isinstance(weights, Paced):
        products = weights.over_rounds(products, lambda factors: functools.reduce(lambda a, b: b @ a, factors))
    n = base.num_nodes
    q = np.eye(n) - 1 / n
    rounds = [_round(q if product is None else product, q) for product in products]
    radius = np.abs(np.linalg.eigvals(functools.reduce(lambda a, b: b @ a, rounds))).max()
    return float(radius ** (1 / len(rounds)))


def _of_modes(eigenvalues: np.ndarray) -> float:
    root = np.sqrt(eigenvalues.astype(np.complex128) ** 2 - eigenvalues)
    return float(max(np.abs(eigenvalues + root).max(), np.abs(eigenvalues - root).max()))


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
