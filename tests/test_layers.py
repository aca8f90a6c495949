"""The layers against those of flax, in float64: values, parameters, and gradients of parameters and inputs."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcliques_jax import layers, models

pytestmark = pytest.mark.usefixtures("x64")


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def assert_equal(ours, flax_s, inputs):
    params = ours.init(jax.random.key(0), inputs)
    jax.tree.map(np.testing.assert_array_equal, params, flax_s.init(jax.random.key(0), inputs))

    def value_and_gradients(module):
        def loss(params, inputs):
            outputs = module.apply(params, inputs)
            return jnp.sum(outputs * normal(*outputs.shape, seed=1)), outputs

        (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, inputs)
        return outputs, gradients

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10),
        value_and_gradients(ours),
        value_and_gradients(flax_s),
    )


@pytest.mark.parametrize("shape", [(5, 6), (40, 6), (2, 3, 6)])
@pytest.mark.parametrize("units", [1, 8, 10])
def test_dense(shape, units):
    assert_equal(layers.Dense(units), nn.Dense(units), normal(*shape))


@settings(max_examples=10)  # each has shapes of its own to compile for
@given(
    size=st.sampled_from([(6, 9), (7, 6), (9, 8)]),
    channels=st.sampled_from([1, 3, 20, 70]),
    window=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.sampled_from(["SAME", "VALID", 1, ((0, 3), (2, 1)), ((4, 4), (5, 0)), "CIRCULAR"]),
)
def test_conv(size, channels, window, strides, padding):
    arguments = {"strides": strides, "padding": padding}
    assert_equal(layers.Conv(4, window, **arguments), nn.Conv(4, window, **arguments), normal(2, *size, channels))


@pytest.mark.parametrize(
    ("shape", "window", "arguments"),
    [
        ((2, 8, 8, 4), (3, 3), {"kernel_dilation": 2}),
        ((2, 8, 8, 4), (3, 3), {"feature_group_count": 2}),
        ((2, 8, 8, 4), (3, 3), {"input_dilation": 2, "padding": 1}),
        ((2, 8, 4), (3,), {}),
        ((2, 5, 5, 5, 4), (3, 3, 3), {}),
    ],
)
def test_conv_leaves_to_xla_what_it_does_not_do_itself(shape, window, arguments):
    assert_equal(layers.Conv(4, window, **arguments), nn.Conv(4, window, **arguments), normal(*shape))


@pytest.mark.parametrize(("groups", "shape"), [(2, (3, 5, 4, 6)), (1, (2, 6)), (3, (2, 4, 6)), (6, (1, 3, 3, 6))])
def test_group_norm(groups, shape):
    inputs = normal(*shape) * 3 + 1
    assert_equal(layers.GroupNorm(groups, epsilon=1e-5), nn.GroupNorm(groups, epsilon=1e-5), inputs)


def group_norm(module, inputs, scale, bias):
    return jax.jit(module.apply)({"params": {"scale": scale, "bias": bias}}, inputs)


@pytest.mark.parametrize("parameters", ["the same", jnp.float32])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_group_norm_in_half_precision(dtype, parameters):
    """Squares of 300 overflow in float16, and in bfloat16 the variance would be lost beside them."""
    kind = dtype if parameters == "the same" else parameters
    inputs = (normal(4, 5, 5, 6) * 30 + 300).astype(dtype)
    scale, bias = (normal(6, seed=seed).astype(kind) for seed in (1, 2))
    found, expected = (
        group_norm(module, inputs, scale, bias) for module in (layers.GroupNorm(2), nn.GroupNorm(2, param_dtype=kind))
    )
    assert found.dtype == expected.dtype
    last_bit = float(jnp.finfo(found.dtype).eps)
    np.testing.assert_allclose(
        found.astype(jnp.float64), expected.astype(jnp.float64), rtol=2 * last_bit, atol=max(1e-4, 4 * last_bit)
    )


@pytest.mark.optimised
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_group_norm_in_full_precision_keeps_its_bits(dtype):
    """Those of the formula without any conversion."""

    @jax.jit
    def formula(inputs, scale, bias):
        def of_groups(x):
            means = x.mean(axis=(1, 2)).reshape(-1, 2, 3)
            return jnp.broadcast_to(means.mean(axis=2, keepdims=True), means.shape).reshape(-1, 6)

        mean = of_groups(inputs)
        variance = jnp.maximum(of_groups(jnp.square(inputs)) - jnp.square(mean), 0)
        factor = jax.lax.rsqrt(variance + 1e-6) * scale[None]
        shift = bias[None] - mean * factor
        return inputs * jnp.expand_dims(factor, (1, 2)) + jnp.expand_dims(shift, (1, 2))

    inputs, scale, bias = (normal(*shape).astype(dtype) for shape in [(4, 5, 5, 6), (6,), (6,)])
    found = group_norm(layers.GroupNorm(2), inputs, scale, bias)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, formula(inputs, scale, bias))


def test_groups_must_divide_the_channels():
    with pytest.raises(ValueError, match="num_groups=4 must divide the 6 channels"):
        layers.GroupNorm(4).init(jax.random.key(0), normal(2, 6))


@settings(max_examples=15)
@given(
    size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    window=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    strides=st.none() | st.tuples(st.integers(1, 4), st.integers(1, 4)),
    padding=st.sampled_from(["SAME", "VALID", ((1, 1), (0, 1))]),
)
def test_max_pool_with_many_equal_maxima(size, window, strides, padding):
    if padding not in ("SAME", "VALID"):
        padding = tuple((min(low, w - 1), min(high, w - 1)) for (low, high), w in zip(padding, window, strict=True))
    inputs = jnp.asarray(np.random.default_rng(0).integers(0, 4, size=(2, *size, 3)), jnp.float64)

    @functools.partial(jax.jit, static_argnums=0)
    def value_and_gradient(pool, inputs):
        outputs, back = jax.vjp(lambda x: pool(x, window, strides, padding), inputs)
        return outputs, back(normal(*outputs.shape))[0]

    found, expected = value_and_gradient(layers.max_pool, inputs), value_and_gradient(nn.max_pool, inputs)
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], atol=1e-12)


class FlaxGNLeNet(nn.Module):
    """`models.gn_lenet` as a user of flax would write it."""

    @nn.compact
    def __call__(self, x):
        def normalise(x):
            return nn.GroupNorm(num_groups=2, epsilon=1e-5)(x)

        def pool(x):
            return nn.max_pool(x, (3, 3), (2, 2))

        x = nn.relu(normalise(pool(nn.Conv(32, (5, 5), padding=2)(x))))
        x = nn.relu(pool(normalise(nn.Conv(32, (5, 5), padding=2)(x))))
        x = nn.relu(pool(normalise(nn.Conv(64, (5, 5), padding=2)(x))))
        return nn.Dense(10)(x.reshape(len(x), -1))


def test_gn_lenet_lifted_over_nodes_has_the_gradients_of_flax():
    inputs = normal(2, 3, 16, 16, 3)  # [nodes, batch, ...]
    params = jax.vmap(models.gn_lenet().init, in_axes=(0, None))(jax.random.split(jax.random.key(0)), inputs[0])

    def gradients(module):
        def loss(params, inputs):
            return jnp.sum(module.apply(params, inputs) * normal(3, 10, seed=1))

        return jax.jit(jax.vmap(jax.grad(loss)))(params, inputs)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-9), gradients(models.gn_lenet()), gradients(FlaxGNLeNet())
    )
