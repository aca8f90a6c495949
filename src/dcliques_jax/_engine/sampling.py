"""Which examples a node sees in a round.

Nodes sample without replacement inside an epoch: each goes through its examples in an order that is drawn anew for
every epoch, `batch_size` at a time, and keeps a short last batch. Where nodes differ in size, `batch_size` is that of
the largest and the others take proportionally smaller batches. So an epoch lasts equally many rounds for all, every
example is seen exactly once, and every node counts the same in every round (eq. 1). Only a node with fewer examples
than an epoch has rounds sits some of them out, with a gradient of zero.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dcliques_jax._random import random_rows

# Longest list whose positions fit beside enough random bits: one in 64 of its examples draws those of another, and
# the two keep their order.
_MOST_PACKED = 8192


def rounds_per_epoch(sizes: np.ndarray, batch_size: int) -> int:
    """Rounds until the largest node, and with it every other, has seen all its examples.

    >>> rounds_per_epoch(np.array([500, 500]), 128)
    4
    """
    return -(-int(sizes.max()) // batch_size)


def bounds(sizes: np.ndarray, batch_size: int, largest: int | None = None) -> np.ndarray:
    """Where the batches of each node begin and end in its list of examples, `[nodes, rounds per epoch + 1]`.

    `largest` is the size of the node whose batches are whole, by default that of the largest of these.

    >>> bounds(np.array([500, 250, 2]), 128)
    array([[  0, 128, 256, 384, 500],
           [  0,  64, 128, 192, 250],
           [  0,   0,   1,   1,   2]])
    """
    largest = int(sizes.max()) if largest is None else largest
    positions = np.arange(rounds_per_epoch(np.array([largest]), batch_size) + 1) * batch_size  # of the largest node
    return np.minimum(positions * sizes[:, None] // largest, sizes[:, None])


def shuffle(
    key: jax.Array, epoch: jax.Array, width: int, sizes: jax.Array, nodes: jax.Array, own_width: jax.Array | None = None
) -> jax.Array:
    """The order of an epoch in which some nodes go through their lists of examples, `[nodes, width]`.

    Lists are padded to length `width`; the padding stays behind. The order depends on the number of a node only, not on
    where and beside which others it is stored. With an `own_width` it is that of lists padded to this length.
    """
    if width > _MOST_PACKED:
        positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (len(nodes), width))
        draws = random_rows(jax.random.fold_in(key, epoch), nodes, width, own_width)
        draws = jnp.where(positions < sizes[:, None], draws, jnp.uint32(2**32 - 1))
        return jax.lax.sort((draws, positions), dimension=1, num_keys=2)[1]
    bits = (
        jnp.uint32((width - 1).bit_length())
        if own_width is None
        else 32 - jax.lax.clz(own_width.astype(jnp.uint32) - 1)
    )
    positions = jnp.arange(width, dtype=jnp.uint32)[None]
    draws = random_rows(jax.random.fold_in(key, epoch), nodes, width, own_width)
    last = jnp.uint32(2**32 - 1)
    numbers = (jnp.where(positions < sizes[:, None], draws, last) >> bits << bits) | positions
    if own_width is not None:  # positions that do not fit into the bits
        numbers = jnp.where(positions < own_width.astype(jnp.uint32), numbers, last)
    # One sort of numbers that carry their position in the lowest bits: five times as fast on CPUs as `argsort`.
    order = jax.lax.sort(numbers, dimension=1, is_stable=False) & ((jnp.uint32(1) << bits) - 1)
    return order.astype(jnp.int32)


def batches(
    examples: jax.Array, order: jax.Array, bounds: jax.Array, step_in_epoch: jax.Array, batch_size: int
) -> tuple[jax.Array, jax.Array]:
    """The mini-batches of all nodes in one round of an epoch, out of their lists of examples `[nodes, width]`.

    Returns examples `[nodes, batch_size]`, and which of them belong to the batch and do not only fill up the array.
    """
    positions = bounds[:, step_in_epoch, None] + jnp.arange(batch_size)[None]
    taken = positions < bounds[:, step_in_epoch + 1, None]
    chosen = jnp.take_along_axis(order, jnp.where(taken, positions, 0), axis=1)
    return jnp.take_along_axis(examples, chosen, axis=1), taken
