"""How fast gossip mixes: eigenvalues of a matrix of weights, and the contraction of one or several."""

from collections.abc import Sequence as Matrices
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse

from dcliques_jax._mixing.entries import TOLERANCE, largest_entry
from dcliques_jax._mixing.forms import Weights
from dcliques_jax._mixing.groups import GroupMean
from dcliques_jax._mixing.paced import Paced
from dcliques_jax._mixing.sequences import Drawn, Moving

_DENSE_SPECTRUM = 2000  # nodes up to which all eigenvalues are computed; above, only the extreme ones
_ROUNDING = 1e-12  # distance from the mean matrix J below which a product of matrices counts as J


class Extremes(NamedTuple):
    """The extreme eigenvalues of a symmetric matrix of weights, without the eigenvalue 1 of the constant vector."""

    largest: float
    smallest: float


def second_eigenvalue(weights: Weights) -> float:
    """Computes the second largest absolute eigenvalue, the factor by which gossip shrinks differences.

    For more than 2000 nodes it uses Lanczos iterations, with an error of up to a thousandth of the spectral gap.

    Args:
      weights: a symmetric matrix.

    >>> from dcliques_jax import mixing, topologies
    >>> round(second_eigenvalue(mixing.metropolis_hastings(topologies.ring(100))), 5)
    0.99868
    """
    if isinstance(weights, GroupMean) or weights.num_nodes <= _DENSE_SPECTRUM:
        found = extremes(weights)
        return max(abs(found.largest), abs(found.smallest))
    matrix = _symmetric_matrix(weights)
    if scipy.sparse.csgraph.connected_components(matrix, directed=False)[0] > 1:
        return 1.0  # every part keeps its own mean
    # The distances of eigenvalues from 1, that of the constant vector, and from -1. The smaller one is the gap. In most
    # graphs a rough value shows that -1 is farther away.
    gap, from_minus_one = _from_one(matrix), scipy.sparse.eye_array(matrix.shape[0]) + matrix
    if 0.8 * _least_eigenvalue(from_minus_one, 0.1) < gap:
        gap = min(gap, _least_eigenvalue(from_minus_one, 1e-3))
    return 1 - gap


def smallest_eigenvalue(weights: Weights) -> float:
    """Computes the smallest eigenvalue. Close to -1, models swing between two states from round to round.

    For more than 2000 nodes it uses Lanczos iterations, with an error of up to a thousandth of the distance from -1.

    Args:
      weights: a symmetric matrix.

    >>> from dcliques_jax import mixing, topologies
    >>> round(smallest_eigenvalue(mixing.metropolis_hastings(topologies.ring(100))), 5)
    -0.33333
    """
    if isinstance(weights, GroupMean) or weights.num_nodes <= _DENSE_SPECTRUM:
        return extremes(weights).smallest
    matrix = _symmetric_matrix(weights)
    return _least_eigenvalue(scipy.sparse.eye_array(matrix.shape[0]) + matrix, 1e-3) - 1


def extremes(weights: Weights, *, precise: bool = False) -> Extremes:
    """Computes the extreme eigenvalues of a symmetric matrix; those of a single node are 0.

    Args:
      weights: a symmetric matrix.
      precise: whether the smallest has an error of at most 1e-9 above 2000 nodes, too. Default: as
        `smallest_eigenvalue`.
    """
    if weights.num_nodes == 1:
        return Extremes(0.0, 0.0)
    if isinstance(weights, GroupMean):  # a projection: one eigenvalue of 1 per group, the rest 0
        groups = len(np.asarray(weights.members))
        return Extremes(float(groups > 1), float(groups == weights.num_nodes))
    if weights.num_nodes <= _DENSE_SPECTRUM:
        eigenvalues = np.linalg.eigvalsh(_symmetric_matrix(weights).toarray())
        return Extremes(float(eigenvalues[-2]), float(eigenvalues[0]))
    matrix = _symmetric_matrix(weights)
    parts = scipy.sparse.csgraph.connected_components(matrix, directed=False)[0]
    smallest = _precise_smallest(matrix) if precise else smallest_eigenvalue(weights)
    return Extremes(1.0 if parts > 1 else 1 - _from_one(matrix), smallest)


def spectral_gap(weights: Weights) -> float:
    """Computes one minus the second largest absolute eigenvalue: 1 mixes in one round, 0 never.

    >>> from dcliques_jax import mixing, topologies
    >>> round(spectral_gap(mixing.metropolis_hastings(topologies.fully_connected(100))), 6)
    1.0
    """
    return 1.0 - second_eigenvalue(weights)


def contraction(weights: Weights) -> float:
    """Computes how much of the squared differences between models gossip leaves per round, at worst.

        c = max_X  E |W X - 1 xbar|^2 / |X - 1 xbar|^2      xbar: the mean of the rows of X, J = 1 1^T / n

    - One matrix: `c = |W - J|^2`, the largest singular value squared. It is lambda2^2 if W is symmetric.
    - A sequence of T matrices: `c = |W_T ... W_1 - J|^(2 / T)`, the mean factor of its rounds. It is 0 if their
      product is J.
    - Matrices in which nodes swap their places at random: `c = (|W|_F^2 - 1) / (n - 1)` for any X, the mean over the
      matrices.

    1 never mixes, 0 mixes in one round or one period. Above 2000 nodes only products with vectors are computed.

    Args:
      weights: any weights but `Paced` ones. If columns do not sum to 1, xbar is the mean before the round.

    >>> from dcliques_jax import mixing, topologies
    >>> round(contraction(topologies.ring(16).weights()), 5)
    0.90108
    >>> pairs = np.kron(np.eye(50), np.full((2, 2), 0.5))
    >>> round(contraction(topologies.from_matrices(pairs, drawn=True).weights()), 5)
    0.49495
    """
    n = weights.num_nodes
    if isinstance(weights, Paced):
        raise ValueError("these weights have a pace of their own: pass weights.base for the contraction per gossip")
    if n == 1:
        return 0.0
    if isinstance(weights, GroupMean):
        return extremes(weights).largest
    matrices = weights.matrices()
    if isinstance(weights, Drawn):
        return float(np.mean([squares(matrix) - 1 for matrix in matrices])) / (n - 1)
    if len(matrices) > 1:
        return _of_product(matrices) ** (1 / len(matrices))
    if is_symmetric(matrices[0]):
        return squared(second_eigenvalue(weights))
    return largest_centred((matrices[0].T @ matrices[0]).tocsr())


def squared(eigenvalue: float) -> float:
    """Computes a contraction from |lambda2|; rounding errors of a 0 are none."""
    return eigenvalue**2 if eigenvalue > _ROUNDING else 0.0


def squares(matrix: scipy.sparse.csr_array) -> float:
    """Computes the sum of the squares of all entries."""
    return float(matrix.power(2).sum())


def is_symmetric(matrix: scipy.sparse.csr_array) -> bool:
    """Whether a matrix is symmetric up to the rounding of matrices from outside."""
    return abs(largest_entry(matrix - matrix.T)[2]) <= TOLERANCE


def largest_centred(matrix: scipy.sparse.csr_array) -> float:
    """Computes the largest x^T A x of unit vectors x that sum to 0, for a symmetric matrix A with x^T A x >= 0."""
    n = matrix.shape[0]
    if n <= _DENSE_SPECTRUM:
        dense = matrix.toarray()
        dense -= dense.mean(axis=0)
        dense -= dense.mean(axis=1, keepdims=True)
        return max(0.0, float(np.linalg.eigvalsh(dense)[-1]))
    if np.abs(matrix.sum(axis=1) - 1).max() <= TOLERANCE:
        parts = scipy.sparse.csgraph.connected_components(matrix, directed=False)[0]
        return 1.0 if parts > 1 else 1 - _from_one(matrix)
    return _largest([matrix], [])


def _of_product(matrices: Matrices[scipy.sparse.csr_array]) -> float:
    """Computes |W_T ... W_1 - J|^2."""
    n = matrices[0].shape[0]
    if n <= _DENSE_SPECTRUM:
        product = np.eye(n)
        for matrix in matrices:
            product = matrix @ product
        product -= 1 / n
        if np.abs(product).max() <= _ROUNDING:
            return 0.0
        return float(np.linalg.eigvalsh(product.T @ product)[-1])
    return _largest(matrices, [matrix.T.tocsr() for matrix in reversed(matrices)])


def _largest(forth: Matrices[scipy.sparse.csr_array], back: Matrices[scipy.sparse.csr_array]) -> float:
    """Computes the largest eigenvalue of a product of matrices, first to last, on vectors that sum to 0."""
    n = forth[0].shape[0]

    def apply(x: np.ndarray) -> np.ndarray:
        x = x - x.mean(axis=0)
        for matrix in (*forth, *back):
            x = matrix @ x
        return x - x.mean(axis=0)

    start = np.random.default_rng(0).standard_normal(n)
    if np.linalg.norm(apply(start)) <= _ROUNDING * np.linalg.norm(start):
        return 0.0
    product = scipy.sparse.linalg.LinearOperator((n, n), matvec=apply, dtype=np.float64)
    found = scipy.sparse.linalg.eigsh(
        product, k=1, which="LA", v0=start, tol=1e-4, maxiter=10_000, return_eigenvectors=False
    )
    return float(found[0])


def _symmetric_matrix(weights: Weights) -> scipy.sparse.csr_array:
    if isinstance(weights, Moving):
        raise ValueError(
            "eigenvalues are those of one matrix, and these weights change from round to round: use mixing.contraction"
        )
    matrix = weights.to_sparse()
    if not is_symmetric(matrix):
        raise ValueError("the second eigenvalue needs a symmetric matrix, and these weights are not symmetric")
    return matrix


def _from_one(matrix: scipy.sparse.csr_array) -> float:
    """Computes how far the largest eigenvalue, but that of the constant vector, is from 1."""
    return _least_eigenvalue(scipy.sparse.eye_array(matrix.shape[0]) - matrix, 1e-3, constant=1)


def _least_eigenvalue(matrix: scipy.sparse.csr_array, tolerance: float, constant: int = 0) -> float:
    """Computes the smallest eigenvalue of a symmetric matrix by Lanczos, up to a relative error.

    With `constant=1` it skips the eigenvalue 0 of the constant vector.
    """
    n = matrix.shape[0]
    if _is_narrow(matrix):
        return float(_nearest(matrix, -1e-9, tolerance, 1 + constant).max())  # the shift makes the matrix regular
    product = scipy.sparse.linalg.LinearOperator(
        (n, n), matvec=lambda x: matrix @ x + 2 * constant * x.mean(axis=0), dtype=np.float64
    )
    return float(_lanczos(product, tolerance, k=1, which="SA")[0])


def _precise_smallest(matrix: scipy.sparse.csr_array) -> float:
    """Computes the smallest eigenvalue of a symmetric matrix of weights up to an error of 1e-10."""
    identity = scipy.sparse.eye_array(matrix.shape[0])
    if not _is_narrow(matrix):
        return _least_eigenvalue(2 * identity + matrix, 1e-10) - 2  # far from 0, of which no relative error is reached
    found = _least_eigenvalue(identity + matrix, 1e-3) - 1
    for distance in (4e-3, 1e-5, 1e-7):  # more than twice the error so far; each pass leaves a thousandth of it
        found = float(_nearest(matrix, found - distance, 1e-3, 1)[0])
    return found


def _is_narrow(matrix: scipy.sparse.csr_array) -> bool:
    """Whether a graph is as narrow as a grid: it mixes so slowly that plain Lanczos does not converge."""
    steps = scipy.sparse.csgraph.shortest_path(abs(matrix), unweighted=True, indices=0)
    return bool(np.bincount(steps[np.isfinite(steps)].astype(np.int64)).max() ** 2 <= 10 * matrix.shape[0])


def _nearest(matrix: scipy.sparse.csr_array, place: float, tolerance: float, count: int) -> np.ndarray:
    """Computes the eigenvalues nearest to a place, by Lanczos on the inverse; its factors stay sparse if it is narrow.

    Errors are relative to the distance from the place.
    """
    n = matrix.shape[0]
    factors = scipy.sparse.linalg.splu(
        scipy.sparse.csc_array(matrix - place * scipy.sparse.eye_array(n)),
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )
    inverse = scipy.sparse.linalg.LinearOperator((n, n), matvec=factors.solve, dtype=np.float64)
    return _lanczos(matrix, tolerance, k=count, sigma=place, OPinv=inverse)


def _lanczos(matrix: Any, tolerance: float, **options: Any) -> np.ndarray:
    start = np.random.default_rng(0).standard_normal(matrix.shape[0])  # deterministic
    found: np.ndarray = scipy.sparse.linalg.eigsh(
        matrix, v0=start, tol=tolerance, maxiter=10_000, return_eigenvectors=False, **options
    )
    return found
