"""Layers with the initial values of PyTorch, and the choice of a normalisation."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dcliques_jax import layers


def uniform(fan_in: int) -> Callable[..., jax.Array]:
    """Initialises with U(-1/sqrt(fan_in), 1/sqrt(fan_in)), weights and biases alike."""

    def init(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        bound = fan_in**-0.5
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def dense(features: int, x: jax.Array) -> jax.Array:
    """Applies a linear layer to `[batch, ...]`."""
    start = uniform(x.shape[-1])
    return layers.Dense(features, kernel_init=start, bias_init=start)(x)


def normalised(norm: str, x: jax.Array, *, train: bool, groups: int) -> jax.Array:
    """Applies batch or group normalisation."""
    if norm == "batch":
        return layers.BatchNorm(use_running_average=not train)(x)
    return layers.GroupNorm(num_groups=groups, epsilon=1e-5)(x)


def check_images(name: str, inputs: jax.Array, least: int) -> None:
    """Raises a `ValueError` unless the inputs are images `[batch, height, width, channels]` of at least some size."""
    if inputs.ndim != 4 or min(inputs.shape[1:3]) < least:
        raise ValueError(
            f"{name} takes images [height, width, channels] of at least {least} x {least}, not inputs "
            f"{inputs.shape[1:]}"
        )


FAN_OUT = nn.initializers.variance_scaling(2.0, "fan_out", "normal")  # N(0, 2 / (k^2 c_out))
HE_NORMAL = nn.initializers.variance_scaling(2.0, "fan_in", "normal")
