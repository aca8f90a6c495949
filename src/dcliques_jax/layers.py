"""Layers that run fast when every node has its own weights.

`Dense`, `Conv`, `GroupNorm`, `BatchNorm` and `max_pool` replace those of flax. They have the same names and parameters,
the same values up to rounding, and the arguments that image models need. `EvoNorm` is one more. The layers of flax work
too, but XLA:CPU runs them many times slower when they are lifted over nodes: convolutions with one kernel per node
become grouped convolutions, and gradients of pools become scatters. Here convolutions are matrix products and pools are
maxima of slices, and so are their gradients.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from dcliques_jax._engine.xla import unfused

Pads = tuple[tuple[int, int], tuple[int, int]]

_LANES = 8  # floats per vector
# From this batch size on, products with few units are a quarter faster if units are padded to full vectors.
_PADDED_BATCH = 32


def dot_general(lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, precision: Any = None, **kwargs: Any) -> Any:
    """`jax.lax.dot_general` for `flax.linen.Dense(dot_general=...)`.

    It is fast for inputs `[batch, features]`. The arguments are those of `jax.lax.dot_general`.
    """
    if lhs.ndim == 2 and dimension_numbers == (((1,), (0,)), ((), ())) and not kwargs:
        return _product(precision, lhs, rhs)
    return lax.dot_general(lhs, rhs, dimension_numbers, precision=precision, **kwargs)


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    precision: Any = None,
    **kwargs: Any,
) -> jax.Array:
    """`jax.lax.conv_general_dilated` for `flax.linen.Conv(conv_general_dilated=...)`.

    It is fast for images `[batch, height, width, channels]` with any window, stride and padding. XLA computes dilated
    and grouped convolutions, and those over one or three dimensions. The arguments are those of
    `jax.lax.conv_general_dilated`.
    """
    plain = all(step == 1 for step in (*(lhs_dilation or ()), *(rhs_dilation or ()), feature_group_count))
    layout = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    if lhs.ndim != 4 or not plain or kwargs or layout != (((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))):
        return lax.conv_general_dilated(
            lhs,
            rhs,
            window_strides,
            padding,
            lhs_dilation,
            rhs_dilation,
            dimension_numbers,
            feature_group_count,
            precision=precision,
            **kwargs,
        )
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(lhs.shape[1:3], rhs.shape[:2], window_strides, padding)
    (down, across), ((top, bottom), (left, right)) = window_strides, padding
    return _convolution((down, across), ((top, bottom), (left, right)), precision, lhs, rhs)


class Dense(nn.Dense):
    """`flax.linen.Dense` with a fast gradient."""

    dot_general: Any = dot_general


class Conv(nn.Conv):
    """`flax.linen.Conv` as a matrix product; see `conv_general_dilated`."""

    conv_general_dilated: Any = conv_general_dilated


class GroupNorm(nn.Module):
    """`flax.linen.GroupNorm` over the last axis, for inputs `[batch, ..., channels]`.

    Like flax, it computes means and variances in at least float32, because squares overflow in half precision.
    """

    num_groups: int = 32  # must divide the number of channels
    epsilon: float = 1e-6  # added to the variance

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Normalises each example within groups of channels, then scales and shifts each channel."""
        channels = inputs.shape[-1]
        if channels % self.num_groups:
            raise ValueError(f"num_groups={self.num_groups} must divide the {channels} channels of the inputs")
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))
        spatial = tuple(range(1, inputs.ndim - 1))
        precise = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
        mean = _of_groups(precise, self.num_groups)
        variance = jnp.maximum(_of_groups(jnp.square(precise), self.num_groups) - jnp.square(mean), 0)
        factor = lax.rsqrt(variance + self.epsilon) * scale[None]
        shift = bias[None] - mean * factor
        normalised = precise * jnp.expand_dims(factor, spatial) + jnp.expand_dims(shift, spatial)
        return normalised.astype(jnp.result_type(inputs, scale, bias))


class BatchNorm(nn.Module):
    """`flax.linen.BatchNorm` over the last axis, with the conventions of PyTorch by default.

        y = (x - mean) / sqrt(var + epsilon) * scale + bias

    In training, mean and var are those of the batch, and the state keeps running ones, `running <- momentum * running +
    (1 - momentum) * batch`. PyTorch keeps the unbiased variance, flax the biased one, and both normalise with the
    biased one.
    """

    use_running_average: bool = False  # whether to normalise with the running statistics, as in evaluation
    momentum: float = 0.9
    epsilon: float = 1e-5
    unbiased: bool = True  # whether the running variance is the unbiased one
    running: bool = True  # whether to keep running statistics; without, evaluation uses those of its batch, too

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Normalises each channel over the batch and all positions, then scales and shifts it."""
        if not self.running and self.is_initializing():
            _check_coupled(self)
        channels, others = inputs.shape[-1:], tuple(range(inputs.ndim - 1))
        scale = self.param("scale", nn.initializers.ones, channels)
        bias = self.param("bias", nn.initializers.zeros, channels)
        precise = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
        if self.running:
            kept_mean = self.variable("batch_stats", "mean", jnp.zeros, channels, precise.dtype)
            kept_var = self.variable("batch_stats", "var", jnp.ones, channels, precise.dtype)
        if self.running and self.use_running_average:
            mean, variance = kept_mean.value, kept_var.value
        else:
            mean = precise.mean(axis=others)
            variance = jnp.maximum(jnp.square(precise).mean(axis=others) - jnp.square(mean), 0)
        if self.running and not self.use_running_average and not self.is_initializing():
            count = inputs.size // inputs.shape[-1]
            stored = variance * (count / max(count - 1, 1)) if self.unbiased else variance
            kept_mean.value = self.momentum * kept_mean.value + (1 - self.momentum) * mean
            kept_var.value = self.momentum * kept_var.value + (1 - self.momentum) * stored
        factor = lax.rsqrt(variance + self.epsilon) * scale
        normalised = precise * jnp.expand_dims(factor, others) + jnp.expand_dims(bias - mean * factor, others)
        return normalised.astype(jnp.result_type(inputs, scale, bias))


def _check_coupled(norm: nn.Module) -> None:
    """Raises a `ValueError` unless the outermost module says that its outputs depend on the whole batch."""
    outermost = norm
    while isinstance(outermost.parent, nn.Module):
        outermost = outermost.parent
    if outermost is not norm and not getattr(outermost, "couples_examples", False):
        name = type(outermost).__name__
        raise ValueError(
            f"{name} has BatchNorm(running=False), which must not see the padding of short batches: set the attribute "
            f"couples_examples = True in the class {name}, so that batches are checked"
        )


class EvoNorm(nn.Module):
    """EvoNorm as QGM and RelaySGD (EPFL) use it: a normalisation and a non-linearity in one, without state.

        y = x sigmoid(x) / sqrt(var + 1e-5) * scale + bias

    The variance is the unbiased one of a group of channels of one example. The original S0 (Liu et al., 2020) has a
    factor per channel within the sigmoid, and others use a piecewise linear sigmoid.
    """

    num_groups: int = 32  # at most as many as channels; must divide their number
    epsilon: float = 1e-5  # added to the variance

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Normalises each example within groups of channels, then scales and shifts each channel."""
        channels = inputs.shape[-1]
        groups = min(self.num_groups, channels)
        if channels % groups:
            raise ValueError(f"num_groups={groups} must divide the {channels} channels of the inputs")
        scale = self.param("scale", nn.initializers.ones, (channels,))
        bias = self.param("bias", nn.initializers.zeros, (channels,))
        spatial = tuple(range(1, inputs.ndim - 1))
        precise = inputs.astype(jnp.promote_types(inputs.dtype, jnp.float32))
        mean = _of_groups(precise, groups)
        count = inputs[0].size // groups
        variance = jnp.maximum(_of_groups(jnp.square(precise), groups) - jnp.square(mean), 0)
        factor = lax.rsqrt(variance * (count / max(count - 1, 1)) + self.epsilon) * scale[None]
        turned = precise * jax.nn.sigmoid(precise) * jnp.expand_dims(factor, spatial)
        return (turned + jnp.expand_dims(bias, tuple(range(inputs.ndim - 1)))).astype(jnp.result_type(inputs, scale))


def _of_groups(x: jax.Array, num_groups: int) -> jax.Array:
    """Returns means over positions and the channels of a group, `[batch, channels]`, of `[batch, ..., channels]`."""
    channels = x.shape[-1]
    means = x.mean(axis=tuple(range(1, x.ndim - 1))).reshape(-1, num_groups, channels // num_groups)
    return jnp.broadcast_to(means.mean(axis=2, keepdims=True), means.shape).reshape(-1, channels)


def max_pool(
    inputs: jax.Array,
    window_shape: tuple[int, int],
    strides: tuple[int, int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "VALID",
) -> jax.Array:
    """`flax.linen.max_pool` of images. The first of equal maxima gets the gradient.

    Args:
      inputs: images `[batch, height, width, channels]`.
      window_shape: height and width of the window.
      strides: steps of the window. Defaults to 1.
      padding: `"VALID"`, `"SAME"`, or the padding before and after of height and width.

    >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1), (2, 2), (2, 2)).reshape(2, 2)
    Array([[ 5.,  7.],
           [13., 15.]], dtype=float32)
    """
    strides = strides or (1, 1)
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(inputs.shape[1:3], window_shape, strides, padding)
    padded = jnp.pad(inputs, ((0, 0), *padding, (0, 0)), constant_values=-jnp.inf)
    return _pool(tuple(window_shape), tuple(strides), padded)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(precision: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies `[batch, features]` and `[features, units]` when no gradient is needed.

    In evaluation all nodes share the inputs, and XLA makes one large product of all nodes.
    """
    return jnp.matmul(x, kernel, precision=precision)


def _product_forward(precision: Any, x: jax.Array, kernel: jax.Array) -> Any:
    units = kernel.shape[1]
    padded = jnp.pad(kernel, ((0, 0), (0, -units % _LANES))) if len(x) >= _PADDED_BATCH else kernel
    return jnp.matmul(x, padded, precision=precision)[:, :units], (x, kernel)


def _product_backward(precision: Any, saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    # Compute the gradient of the kernel as [units, features] and transpose it. XLA:CPU runs the direct product,
    # [features, units], slower than all other orders (by a factor of three for 1000 nodes with batches of 13).
    of_kernel = unfused(functools.partial(jnp.matmul, precision=precision))(gradient.T, x).T
    return jnp.matmul(gradient, kernel.T, precision=precision), of_kernel


_product.defvjp(_product_forward, _product_backward)


def _convolution(strides: tuple[int, int], pads: Pads, precision: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes the convolution as one matrix product.

        y[r, w] = sum_i z_i[r + i, w]       z_i[r, w] = sum_j x[r, w + j] K[i, j]

    The columns of a window are concatenated before the product, its rows are summed after it. With few channels it
    takes less memory traffic to concatenate the rows before the product, too: patches. So it does if windows move by
    several rows, and z_i would be computed for rows that they skip.
    """
    height, width, channels, units = kernel.shape
    if strides[0] > 1 or height * width * channels <= width * channels + height * units:
        x = jnp.concatenate(_slices(jnp.pad(x, ((0, 0), pads[0], (0, 0), (0, 0))), 1, height, strides[0]), axis=3)
        kernel = kernel.swapaxes(0, 1).reshape(1, width, height * channels, units)
        to_full = (0, -x.shape[3] % _LANES)  # full vectors copy faster
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), to_full))
        kernel = jnp.pad(kernel, ((0, 0), (0, 0), to_full, (0, 0)))
        strides, pads = (1, strides[1]), ((0, 0), pads[1])
    return _runs_product(strides, pads, precision, x, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _runs_product(strides: tuple[int, int], pads: Pads, precision: Any, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _runs_product_forward(strides, pads, precision, x, kernel)[0]


def _runs_product_forward(
    strides: tuple[int, int], pads: Pads, precision: Any, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, Any]:
    height, width, channels, units = kernel.shape
    across = _slices(jnp.pad(x, ((0, 0), (0, 0), pads[1], (0, 0))), 2, width, strides[1])
    runs = jnp.concatenate(across, axis=3)  # [batch, rows of x, columns, width * channels]
    factor = kernel.transpose(1, 2, 0, 3).reshape(width * channels, height * units)
    product = jnp.matmul(runs, factor, precision=precision)

    @unfused
    def summed(product: jax.Array) -> jax.Array:
        parts = _slices(jnp.pad(product, ((0, 0), pads[0], (0, 0), (0, 0))), 1, height, strides[0])
        return functools.reduce(jnp.add, (part[..., i * units : (i + 1) * units] for i, part in enumerate(parts)))

    return summed(product), (x.shape, runs, kernel)


def _runs_product_backward(
    strides: tuple[int, int], pads: Pads, precision: Any, saved: Any, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    shape, runs, kernel = saved
    height, width, channels, units = kernel.shape
    down = [_spread(gradient, 1, i - pads[0][0], strides[0], shape[1]) for i in range(height)]
    spread = jnp.concatenate(down, axis=3)  # [batch, rows of x, columns, height * units]
    flat_runs, flat_spread = runs.reshape(-1, width * channels), spread.reshape(-1, height * units)
    of_kernel = jnp.matmul(flat_runs.T, flat_spread, precision=precision)
    of_kernel = of_kernel.reshape(width, channels, height, units).transpose(2, 0, 1, 3)
    factor = kernel.transpose(0, 3, 1, 2).reshape(height * units, width * channels)
    product = jnp.matmul(spread, factor, precision=precision)

    @unfused
    def summed(product: jax.Array) -> jax.Array:
        parts = (product[..., j * channels : (j + 1) * channels] for j in range(width))
        return functools.reduce(
            jnp.add, (_spread(part, 2, j - pads[1][0], strides[1], shape[2]) for j, part in enumerate(parts))
        )

    return summed(product), of_kernel


_runs_product.defvjp(_runs_product_forward, _runs_product_backward)


def _slices(x: jax.Array, axis: int, window: int, stride: int) -> list[jax.Array]:
    """Slices what entry 0, 1, .. of a window sees as the window moves along an axis."""
    last = stride * ((x.shape[axis] - window) // stride)
    return [lax.slice_in_dim(x, entry, entry + last + 1, stride, axis) for entry in range(window)]


def _spread(x: jax.Array, axis: int, start: int, stride: int, size: int) -> jax.Array:
    """Places x at every `stride`-th of `size` entries, from `start` on, with zeros elsewhere."""
    pads = [(0, 0, 0)] * x.ndim
    pads[axis] = (start, size - start - stride * (x.shape[axis] - 1) - 1, stride - 1)
    return lax.pad(x, jnp.zeros((), x.dtype), pads)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _pool(window: tuple[int, int], strides: tuple[int, int], x: jax.Array) -> jax.Array:
    for axis in (1, 2):  # separable: fewer comparisons, and whole vectors first
        maxima = functools.partial(_maxima, axis, window[axis - 1], strides[axis - 1])
        x = unfused(maxima)(x)
    return x


def _maxima(axis: int, window: int, stride: int, x: jax.Array) -> jax.Array:
    return functools.reduce(jnp.maximum, _slices(x, axis, window, stride))


def _taps(window: tuple[int, int], strides: tuple[int, int], x: jax.Array) -> list[jax.Array]:
    """Slices the inputs, one slice of the shape of the outputs per entry of a window."""
    rows = _slices(x, 1, window[0], strides[0])
    return [tap for row in rows for tap in _slices(row, 2, window[1], strides[1])]


def _pool_forward(window: tuple[int, int], strides: tuple[int, int], x: jax.Array) -> Any:
    y = _pool(window, strides, x)
    return y, (x, y)


def _pool_backward(window: tuple[int, int], strides: tuple[int, int], saved: Any, gradient: jax.Array) -> Any:
    x, y = saved
    winner = jnp.full(y.shape, -1, jnp.int16)  # the first entry of a window that holds its maximum
    for tap, values in reversed(list(enumerate(_taps(window, strides, x)))):
        winner = jnp.where(values == y, jnp.int16(tap), winner)
    # Group inputs by their phase, the position within a stride. The same taps of windows, a fixed number of steps
    # before, cover all inputs of a phase, so their gradients are sums of slices.
    batch, *size, channels = x.shape
    steps = [-(-length // stride) for length, stride in zip(size, strides, strict=True)]
    reach = [(w - 1) // s for w, s in zip(window, strides, strict=True)]
    margins = [(back, step - length) for back, step, length in zip(reach, steps, y.shape[1:3], strict=True)]
    winner = jnp.pad(winner, ((0, 0), *margins, (0, 0)), constant_values=-1)
    gradient = jnp.pad(gradient, ((0, 0), *margins, (0, 0)))

    def passed_back(i: int, j: int) -> jax.Array:
        rows, columns = (
            slice(back - k // stride, back - k // stride + step)
            for back, step, k, stride in zip(reach, steps, (i, j), strides, strict=True)
        )
        return jnp.where(winner[:, rows, columns] == i * window[1] + j, gradient[:, rows, columns], 0)

    def phase(row: int, column: int) -> jax.Array:
        taps = itertools.product(range(row, window[0], strides[0]), range(column, window[1], strides[1]))
        zero = jnp.zeros((batch, *steps, channels), gradient.dtype)
        return sum((passed_back(i, j) for i, j in taps), start=zero)

    phases = [jnp.stack([phase(row, column) for column in range(strides[1])], 3) for row in range(strides[0])]
    whole = jnp.stack(phases, 2).reshape(batch, steps[0] * strides[0], steps[1] * strides[1], channels)
    return (whole[:, : size[0], : size[1]],)


_pool.defvjp(_pool_forward, _pool_backward)
