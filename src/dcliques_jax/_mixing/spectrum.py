"""How fast gossip mixes: the second eigenvalue of a matrix of weights."""

import functools

import numpy as np
import scipy.sparse

from dcliques_jax._mixing.forms import TOLERANCE, Weights, largest_entry
from dcliques_jax._mixing.groups import GroupMean

_DENSE_SPECTRUM = 2000  # nodes up to which all eigenvalues are computed; above, only the extreme ones


def second_eigenvalue(weights: Weights) -> float:
    """Computes the second largest absolute eigenvalue, the factor by which gossip shrinks differences.

    For more than 2000 nodes it uses Lanczos iterations, with an error of up to a thousandth of the spectral gap.

    Args:
      weights: a symmetric matrix.

    >>> from dcliques_jax import mixing, topologies
    >>> round(second_eigenvalue(mixing.metropolis_hastings(topologies.ring(100))), 5)
    0.99868
    """
    if isinstance(weights, GroupMean):  # a projection: one eigenvalue of 1 per group, the rest 0
        return float(len(np.asarray(weights.members)) > 1)
    n, matrix = weights.num_nodes, weights.to_sparse()
    if n == 1:
        return 0.0
    if abs(largest_entry(matrix - matrix.T)[2]) > TOLERANCE:
        raise ValueError("the second eigenvalue needs a symmetric matrix, and these weights are not symmetric")
    if n <= _DENSE_SPECTRUM:
        return float(np.sort(np.abs(np.linalg.eigvalsh(matrix.toarray())))[-2])
    if scipy.sparse.csgraph.connected_components(matrix, directed=False)[0] > 1:
        return 1.0  # every part keeps its own mean
    # The distances of eigenvalues from 1, that of the constant vector, and from -1. The smaller one is the gap. In most
    # graphs a rough value shows that -1 is farther away.
    from_one, from_minus_one = (scipy.sparse.eye_array(n) + sign * matrix for sign in (-1, 1))
    gap = _least_eigenvalue(from_one, 1e-3, constant=1)
    if 0.8 * _least_eigenvalue(from_minus_one, 0.1) < gap:
        gap = min(gap, _least_eigenvalue(from_minus_one, 1e-3))
    return 1 - gap


def _least_eigenvalue(matrix: scipy.sparse.csr_array, tolerance: float, constant: int = 0) -> float:
    """Computes the smallest eigenvalue of a symmetric matrix by Lanczos, up to a relative error.

    With `constant=1` it skips the eigenvalue 0 of the constant vector.
    """
    n = matrix.shape[0]
    start = np.random.default_rng(0).standard_normal(n)  # deterministic
    lanczos = functools.partial(
        scipy.sparse.linalg.eigsh, v0=start, tol=tolerance, maxiter=10_000, return_eigenvectors=False
    )
    steps = scipy.sparse.csgraph.shortest_path(abs(matrix), unweighted=True, indices=0).astype(np.int64)
    if np.bincount(steps).max() ** 2 > 10 * n:
        product = scipy.sparse.linalg.LinearOperator(
            (n, n), matvec=lambda x: matrix @ x + 2 * constant * x.mean(axis=0), dtype=np.float64
        )
        return float(lanczos(product, k=1, which="SA")[0])
    # Graphs as narrow as a grid mix so slowly that plain Lanczos does not converge. Use the inverse, whose factors stay
    # sparse. The shift makes the matrix regular.
    shift = 1e-9
    factors = scipy.sparse.linalg.splu(
        scipy.sparse.csc_array(matrix + shift * scipy.sparse.eye_array(n)),
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0.0,
        options={"SymmetricMode": True},
    )
    inverse = scipy.sparse.linalg.LinearOperator((n, n), matvec=factors.solve, dtype=np.float64)
    return float(lanczos(matrix, k=1 + constant, sigma=-shift, OPinv=inverse).max())


def spectral_gap(weights: Weights) -> float:
    """Computes one minus the second largest absolute eigenvalue: 1 mixes in one round, 0 never.

    >>> from dcliques_jax import mixing, topologies
    >>> round(spectral_gap(mixing.metropolis_hastings(topologies.fully_connected(100))), 6)
    1.0
    """
    return 1.0 - second_eigenvalue(weights)
