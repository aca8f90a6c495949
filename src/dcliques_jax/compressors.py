"""Compressed messages, for `algorithms.choco`.

A `Compressor` maps a vector to what receivers know of it after a compressed message, and counts its bytes:

    |C(x) - x|^2 <= (1 - delta) |x|^2      on average, with delta > 0
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dcliques_jax import _checks

_VALUE, _INDEX, _SEED = 4, 4, 8  # bytes of a float32 number, an int32 index, and the seed of a random choice


class Compressor(NamedTuple):
    """A lossy compression of vectors."""

    compress: Callable[[jax.Array, jax.Array], jax.Array]  # (random key, x [d]) -> what receivers get, [d]
    bytes: Callable[[int], int]  # d -> size of a message


def top_k(fraction: float) -> Compressor:
    """Keeps the entries with the largest absolute values; delta is at least k / d.

    A message holds k = fraction * d numbers, rounded up, and their indices: 8 k bytes. Of equal entries, it keeps the
    first.

    >>> top_k(0.4).compress(jax.random.key(0), jnp.array([1.0, -3.0, 2.0, 0.0, -1.0]))
    Array([ 0., -3.,  2.,  0.,  0.], dtype=float32)
    >>> top_k(0.01).bytes(7850)
    632
    """
    fraction = _fraction(fraction)

    def compress(key: jax.Array, x: jax.Array) -> jax.Array:
        del key
        return _only(x, jax.lax.top_k(jnp.abs(x), _kept(fraction, len(x)))[1])

    return Compressor(compress, lambda d: (_VALUE + _INDEX) * _kept(fraction, d))


def random_k(fraction: float) -> Compressor:
    """Keeps entries at random, without scaling them; delta = k / d.

    A message holds k = fraction * d numbers, rounded up, and the seed of the choice: 4 k + 8 bytes.

    >>> jnp.count_nonzero(random_k(0.4).compress(jax.random.key(0), jnp.ones(5)))
    Array(2, dtype=int32)
    >>> random_k(0.01).bytes(7850)
    324
    """
    fraction = _fraction(fraction)

    def compress(key: jax.Array, x: jax.Array) -> jax.Array:
        return _only(x, jax.lax.top_k(jax.random.uniform(key, x.shape), _kept(fraction, len(x)))[1])

    return Compressor(compress, lambda d: _VALUE * _kept(fraction, d) + _SEED)


def quantise(levels: int) -> Compressor:
    """Rounds absolute values at random to multiples of `|x| / levels` (QSGD; Alistarh et al., 2017), scaled down.

        C(x)_i = |x| sign(x_i) floor(s |x_i| / |x| + U_i) / (s (1 + w))      w = min(d / s^2, sqrt(d) / s)

    U is uniform in [0, 1), s = levels, delta = 1 / (1 + w). A message holds a sign and a level per entry, and the norm:
    d (1 + ceil(log2(s + 1))) / 8 + 4 bytes, rounded up.

    >>> quantise(15).bytes(1000)
    629
    """
    levels = _checks.integer("levels", levels, 1)

    def compress(key: jax.Array, x: jax.Array) -> jax.Array:
        norm = jnp.sqrt(jnp.sum(jnp.square(x)))
        noise = jax.random.uniform(key, x.shape, x.dtype)
        level = jnp.floor(levels * jnp.abs(x) / jnp.where(norm > 0, norm, 1) + noise)
        omega = min(len(x) / levels**2, math.sqrt(len(x)) / levels)
        return norm * jnp.sign(x) * level / (levels * (1 + omega))

    bits = 1 + math.ceil(math.log2(levels + 1))
    return Compressor(compress, lambda d: math.ceil(d * bits / 8) + _VALUE)


def _only(x: jax.Array, chosen: jax.Array) -> jax.Array:
    """Sets all entries but the chosen ones to 0."""
    return jnp.zeros_like(x).at[chosen].set(x[chosen], unique_indices=True)


def _kept(fraction: float, d: int) -> int:
    return max(1, math.ceil(round(fraction * d, 6)))  # 0.07 * 100 is 7.000000000000001


def _fraction(value: float) -> float:
    fraction = _checks.share("fraction", value)
    if fraction == 0:
        raise ValueError("fraction=0: nothing would be sent; pass a number above 0, such as 0.01")
    return fraction
