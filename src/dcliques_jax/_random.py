"""Random generators of the host, and draws by counter inside of programs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p

from dcliques_jax._checks import integer


def generator(seed: Any, *stream: int) -> np.random.Generator:
    """A random generator for a seed; those of different streams are independent."""
    return np.random.default_rng([integer("seed", seed, 0, 2**32 - 1), *stream])


def random_rows(key: jax.Array, rows: jax.Array, columns: int, width: jax.Array | None = None) -> jax.Array:
    """Some rows of the matrix `jax.random.bits(key, (.., columns))` of a threefry key, without drawing the others.

    With a `width` the first columns, and as many as there are of them, are those of a matrix of so many.
    """
    first, second = jax.random.key_data(key)
    stride = jnp.uint32(columns) if width is None else width.astype(jnp.uint32)
    places = rows.astype(jnp.uint32)[:, None] * stride + jnp.arange(columns, dtype=jnp.uint32)[None]
    high, low = threefry2x32_p.bind(first, second, jnp.zeros_like(places), places)
    return high ^ low
