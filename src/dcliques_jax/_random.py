"""Random generators on the host, and draws by counter inside programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from dcliques_jax._checks import integer


def generator(seed: Any, *stream: int) -> np.random.Generator:
    """Makes a random generator for a seed. Different streams are independent."""
    return np.random.default_rng([integer("seed", seed, 0, 2**32 - 1), *stream])


def random_rows(key: jax.Array, rows: jax.Array, columns: int, width: jax.Array | None = None) -> jax.Array:
    """Draws some rows of the matrix `jax.random.bits(key, (.., columns))` of a threefry key, and only these.

    With a `width`, draws the first `columns` columns of the matrix that is `width` columns wide.
    """
    first, second = jax.random.key_data(key)
    stride = jnp.uint32(columns) if width is None else width.astype(jnp.uint32)
    counters = rows.astype(jnp.uint32)[:, None] * stride + jnp.arange(columns, dtype=jnp.uint32)[None]
    high, low = threefry2x32_p.bind(first, second, jnp.zeros_like(counters), counters)
    return high ^ low


def random_bits(key: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Draws 32 random bits for every pair of numbers, given as two arrays of one shape.

    They depend on a threefry key and the pair, and on nothing else: all devices and storage orders draw the same.
    """
    high, low = jax.random.key_data(key)
    one, other = threefry2x32_p.bind(high, low, first.astype(jnp.uint32), second.astype(jnp.uint32))
    return one ^ other
