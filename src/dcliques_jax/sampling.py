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


def rounds_per_epoch(sizes: np.ndarray, batch_size: int) -> int:
    """Rounds until the largest node, and with it every other, has seen all its examples.

    >>> rounds_per_epoch(np.array([500, 500]), 128)
    4
    """
    return -(-int(sizes.max()) // batch_size)


def bounds(sizes: np.ndarray, batch_size: int) -> np.ndarray:
    """Where the batches of each node begin and end in its list of examples, `[nodes, rounds per epoch + 1]`.

    >>> bounds(np.array([500, 250, 2]), 128)
    array([[  0, 128, 256, 384, 500],
           [  0,  64, 128, 192, 250],
           [  0,   0,   1,   1,   2]])
    """
    places = np.arange(rounds_per_epoch(sizes, batch_size) + 1) * batch_size  # of the largest node
    return np.minimum(places * sizes[:, None] // sizes.max(), sizes[:, None])


def shuffle(key: jax.Array, epoch: jax.Array, examples: jax.Array, sizes: jax.Array) -> jax.Array:
    """The examples `[nodes, most]` of every node in the order of an epoch; what is padding stays behind them."""
    most = examples.shape[1]
    bits = (most - 1).bit_length()
    places = jnp.arange(most, dtype=jnp.uint32)[None]
    draws = jax.random.bits(jax.random.fold_in(key, epoch), examples.shape, jnp.uint32)
    draws = jnp.where(places < sizes[:, None], draws, jnp.uint32(2**32 - 1))
    # One sort of numbers that carry their place in the lowest bits: five times as fast on CPUs as `argsort`.
    order = jax.lax.sort((draws >> bits << bits) | places, dimension=1, is_stable=False) & (2**bits - 1)
    return jnp.take_along_axis(examples, order.astype(jnp.int32), axis=1)


def batches(shuffled: jax.Array, bounds: jax.Array, turn: jax.Array, batch_size: int) -> tuple[jax.Array, jax.Array]:
    """The mini-batches of all nodes in round `turn` of an epoch.

    Returns examples `[nodes, batch_size]`, and which of them belong to the batch and do not only fill up the array.
    """
    places = bounds[:, turn, None] + jnp.arange(batch_size)[None]
    taken = places < bounds[:, turn + 1, None]
    return jnp.take_along_axis(shuffled, jnp.where(taken, places, 0), axis=1), taken
