"""The examples that nodes see in a round.

By default nodes sample without replacement within an epoch: each takes `batch_size` examples at a time, in an order
that is drawn for every epoch, and keeps a short last batch. If nodes differ in size, `batch_size` is that of the
largest node and the others take proportionally smaller batches. So an epoch has the same number of rounds for all
nodes, every example is seen exactly once, and every node counts the same in every round (eq. 1). Only a node with fewer
examples than an epoch has rounds skips some rounds, with a gradient of zero.

`PartitionedDataset.sampled` offers two other ways, in which all batches are full.
"""

import jax
import jax.numpy as jnp
import numpy as np

from dcliques_jax._random import random_rows

# Longest list whose positions leave enough random bits: one in 64 of its examples draws the same bits as another, and
# the two keep their order.
_MOST_PACKED = 8192


def rounds_per_epoch(sizes: np.ndarray, batch_size: int) -> int:
    """Returns the number of rounds until every node has seen all its examples.

    >>> rounds_per_epoch(np.array([500, 500]), 128)
    4
    """
    return -(-int(sizes.max()) // batch_size)


def full_bounds(num_nodes: int, batch_size: int, rounds: int) -> np.ndarray:
    """Returns the bounds of full batches, the same for all nodes, `[nodes, rounds + 1]`.

    >>> full_bounds(2, 128, 3)
    array([[  0, 128, 256, 384],
           [  0, 128, 256, 384]])
    """
    return np.tile(batch_size * np.arange(rounds + 1), (num_nodes, 1))


def bounds(sizes: np.ndarray, batch_size: int, largest: int | None = None) -> np.ndarray:
    """Returns the bounds of the batches of each node in its list of examples, `[nodes, rounds per epoch + 1]`.

    `largest` is the size of the node with full batches, by default the largest of these.

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
    """Draws the order of each node's examples in an epoch, `[nodes, width]`.

    Lists are padded to length `width`; the padding stays at the end. The order depends on the number of the node, not
    on its slot or on other nodes. With `own_width`, it is the same as for lists padded to that length.
    """
    if width > _MOST_PACKED:
        positions = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (len(nodes), width))
        draws = random_rows(jax.random.fold_in(key, epoch), nodes, width, own_width)
        if own_width is not None:  # without the bits that the positions of a shorter list would take
            bits = jnp.where(own_width > _MOST_PACKED, 0, _bits(own_width))
            draws = draws >> bits << bits
        draws = jnp.where(positions < sizes[:, None], draws, jnp.uint32(2**32 - 1))
        return jax.lax.sort((draws, positions), dimension=1, num_keys=2)[1]
    bits = jnp.uint32((width - 1).bit_length()) if own_width is None else _bits(own_width)
    positions = jnp.arange(width, dtype=jnp.uint32)[None]
    draws = random_rows(jax.random.fold_in(key, epoch), nodes, width, own_width)
    last = jnp.uint32(2**32 - 1)
    numbers = (jnp.where(positions < sizes[:, None], draws, last) >> bits << bits) | positions
    if own_width is not None:  # mask positions that do not fit into the bits
        numbers = jnp.where(positions < own_width.astype(jnp.uint32), numbers, last)
    # Sort numbers with their position in the lowest bits: five times as fast on CPUs as `argsort`.
    order = jax.lax.sort(numbers, dimension=1, is_stable=False) & ((jnp.uint32(1) << bits) - 1)
    return order.astype(jnp.int32)


def _bits(width: jax.Array) -> jax.Array:
    """Returns the number of bits of the positions in a list."""
    return 32 - jax.lax.clz(width.astype(jnp.uint32) - 1)


def draw_with_replacement(
    key: jax.Array, epoch: jax.Array, width: int, sizes: jax.Array, nodes: jax.Array, own_width: None = None
) -> jax.Array:
    """Draws `width` positions in each node's list for an epoch, uniform and independent, `[nodes, width]`."""
    del own_width  # is for lists of different lengths; all nodes draw equally many
    draws = random_rows(jax.random.fold_in(key, epoch), nodes, width)
    # The first examples are more likely than the last by a share of at most size / 2^32.
    return (draws % jnp.maximum(sizes, 1).astype(jnp.uint32)[:, None]).astype(jnp.int32)


def batches(
    examples: jax.Array, order: jax.Array, bounds: jax.Array, step_in_epoch: jax.Array, batch_size: int
) -> tuple[jax.Array, jax.Array]:
    """Selects the mini-batches of all nodes in one round of an epoch from their lists of examples `[nodes, width]`.

    Returns examples `[nodes, batch_size]`, and a mask that is False in the padding.
    """
    positions = bounds[:, step_in_epoch, None] + jnp.arange(batch_size)[None]
    taken = positions < bounds[:, step_in_epoch + 1, None]
    chosen = jnp.take_along_axis(order, jnp.where(taken, positions, 0), axis=1)
    return jnp.take_along_axis(examples, chosen, axis=1), taken
