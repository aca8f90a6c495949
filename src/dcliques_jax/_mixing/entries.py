"""Arrays of indices and matrices as they come from outside: checks, diagonals and orders."""

from typing import Any

import numpy as np
import scipy.sparse

TOLERANCE = 1e-6  # for matrices from outside, which may have been rounded to float32


def slots_of(order: np.ndarray, num_nodes: int) -> np.ndarray:
    """Inverts an order: the slot of each node, `[nodes]`, if node `order[k]` is in slot k."""
    slots, used = np.zeros(num_nodes, np.int32), np.flatnonzero(order >= 0)
    slots[order[used]] = used
    return slots


def check_kind(name: str, array: np.ndarray, kinds: str, ndim: int) -> None:
    if array.dtype.kind not in kinds or array.ndim != ndim:
        what = "real numbers" if "f" in kinds else "integers"
        raise ValueError(f"{name} must be {what} in {ndim} dimensions, not {array.dtype} of shape {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError(f"{name} hold NaN or infinite values")


def check_range(name: str, array: np.ndarray, size: int, what: str) -> None:
    wrong = array[(array < 0) | (array >= size)]
    if len(wrong):
        raise ValueError(f"{name} hold {wrong[0]}, which leaves the {what} 0..{size - 1}")


def check_square(matrix: Any) -> None:
    """Raises a `ValueError` unless the matrix is real and square."""
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or matrix.size == 0 or matrix.dtype.kind not in "iuf":
        raise ValueError(f"a matrix of weights must be real and square, not {matrix.dtype} of shape {matrix.shape}")


def check_rows(matrix: scipy.sparse.csr_array | np.ndarray, name: str = "row") -> None:
    """Raises a `ValueError` unless every row sums to 1. `name` is the word for rows in the message."""
    with np.errstate(invalid="ignore"):
        sums = matrix.sum(axis=1, dtype=np.float64)
    if not np.isfinite(sums).all():
        raise ValueError("the matrix of weights holds NaN or infinite values")
    worst = int(np.abs(sums - 1).argmax())
    if abs(sums[worst] - 1) > TOLERANCE:
        raise ValueError(f"{name} {worst} of the weights sums to {sums[worst]:.6g}; every {name} must sum to 1")


def largest_entry(matrix: scipy.sparse.csr_array) -> tuple[int, int, float]:
    """Finds row, column and value of the entry with the largest absolute value."""
    entries = scipy.sparse.coo_array(matrix)
    if entries.nnz == 0:
        return 0, 0, 0.0
    where = int(np.abs(entries.data).argmax())
    row, column = entries.coords
    return int(row[where]), int(column[where]), float(entries.data[where])


def without_diagonal(matrix: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """Copies a matrix without its diagonal, with sorted indices."""
    matrix = matrix.tocsr(copy=True)
    matrix.setdiag(0)
    matrix.eliminate_zeros()
    matrix.sort_indices()
    return matrix


def with_unit_rows(matrix: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    """Copies a matrix with the diagonal that makes rows sum to 1, which absorbs rounding errors."""
    matrix = without_diagonal(matrix)
    return (matrix + scipy.sparse.diags_array(1 - matrix.sum(axis=1))).tocsr()
