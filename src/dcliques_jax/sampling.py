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
from jax.extend.random import threefry2x32_p

# Longest list whose places fit beside enough random bits: one in 64 of its examples draws those of another, and the two
# keep their order.
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
    places = np.arange(rounds_per_epoch(np.array([largest]), batch_size) + 1) * batch_size  # of the largest node
    return np.minimum(places * sizes[:, None] // largest, sizes[:, None])


def shuffle(
    key: jax.Array, epoch: jax.Array, most: int, sizes: jax.Array, nodes: jax.Array, width: jax.Array | None = None
) -> jax.Array:
    """The order of an epoch in which some nodes go through their lists of examples, `[nodes, most]`.

    Lists are padded to length `most`; the padding stays behind. The order depends on the number of a node only, not on
    where and beside which others it is stored. With a `width` it is that of lists padded to this length.
    """
    if most > _MOST_PACKED:
        places = jnp.broadcast_to(jnp.arange(most, dtype=jnp.int32), (len(nodes), most))
        draws = random_rows(jax.random.fold_in(key, epoch), nodes, most, width)
        draws = jnp.where(places < sizes[:, None], draws, jnp.uint32(2**32 - 1))
        return jax.lax.sort((draws, places), dimension=1, num_keys=2)[1]
    bits = jnp.uint32((most - 1).bit_length()) if width is None else 32 - jax.lax.clz(width.astype(jnp.uint32) - 1)
    places = jnp.arange(most, dtype=jnp.uint32)[None]
    draws = random_rows(jax.random.fold_in(key, epoch), nodes, most, width)
    last = jnp.uint32(2**32 - 1)
    numbers = (jnp.where(places < sizes[:, None], draws, last) >> bits << bits) | places
    if width is not None:  # places that do not fit into the bits
        numbers = jnp.where(places < width.astype(jnp.uint32), numbers, last)
    # One sort of numbers that carry their place in the lowest bits: five times as fast on CPUs as `argsort`.
    order = jax.lax.sort(numbers, dimension=1, is_stable=False) & ((jnp.uint32(1) << bits) - 1)
    return order.astype(jnp.int32)


def random_rows(key: jax.Array, rows: jax.Array, columns: int, width: jax.Array | None = None) -> jax.Array:
    """Some rows of the matrix `jax.random.bits(key, (.., columns))` of a threefry key, without drawing the others.

    With a `width` the first columns, and as many as there are of them, are those of a matrix of so many.
    """
    first, second = jax.random.key_data(key)
    stride = jnp.uint32(columns) if width is None else width.astype(jnp.uint32)
    places = rows.astype(jnp.uint32)[:, None] * stride + jnp.arange(columns, dtype=jnp.uint32)[None]
    high, low = threefry2x32_p.bind(first, second, jnp.zeros_like(places), places)
    return high ^ low


def batches(
    examples: jax.Array, order: jax.Array, bounds: jax.Array, turn: jax.Array, batch_size: int
) -> tuple[jax.Array, jax.Array]:
    """The mini-batches of all nodes in round `turn` of an epoch, out of their lists of examples `[nodes, most]`.

    Returns examples `[nodes, batch_size]`, and which of them belong to the batch and do not only fill up the array.
    """
    places = bounds[:, turn, None] + jnp.arange(batch_size)[None]
    taken = places < bounds[:, turn + 1, None]
    chosen = jnp.take_along_axis(order, jnp.where(taken, places, 0), axis=1)
    return jnp.take_along_axis(examples, chosen, axis=1), taken
