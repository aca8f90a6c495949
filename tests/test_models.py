from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import reference
from dcliques_jax import algorithms, datasets, layers, metrics, models, simulate, topologies


@pytest.mark.usefixtures("x64")
def test_gn_lenet_equals_the_reference():
    model = models.as_model(models.gn_lenet())
    images = jax.random.normal(jax.random.key(1), (2, 32, 32, 3), jnp.float64)
    params, _ = model.init(jax.random.key(0), images)
    # Scales and shifts of the norms start at 1 and 0: random ones show that they are used.
    keys = iter(jax.random.split(jax.random.key(2), 20))
    params = jax.tree.map(lambda leaf: leaf + jax.random.normal(next(keys), leaf.shape, jnp.float64) * 0.1, params)
    expected = reference.gn_lenet(jax.tree.map(np.asarray, params), np.asarray(images))
    np.testing.assert_allclose(model.apply(params, {}, images)[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "shape", "fans"),
    [
        (models.logistic_regression, (28, 28, 1), {"Dense_0": 784}),
        (models.gn_lenet, (32, 32, 3), {"Conv_0": 75, "Conv_1": 800, "Conv_2": 800, "Dense_0": 576}),
    ],
)
def test_weights_and_biases_start_uniform(build, shape, fans):
    params, _ = models.as_model(build()).init(jax.random.key(0), jnp.zeros((1, *shape)))
    for layer, fan_in in fans.items():
        for name in ("kernel", "bias"):
            values, bound = np.asarray(params[layer][name]), fan_in**-0.5
            assert np.abs(values).max() <= bound
            assert np.abs(values).max() > 0.6 * bound
            if values.size > 100:
                assert values.std() == pytest.approx(bound / np.sqrt(3), rel=0.1)
                assert abs(values.mean()) < 0.1 * bound
    for layer in params:
        if layer.startswith("GroupNorm"):
            assert (params[layer]["scale"] == 1).all()
            assert (params[layer]["bias"] == 0).all()


def test_own_flax_module_and_own_pair_of_functions_give_the_same_run():
    data, topology = datasets.synthetic(num_train=100, num_classes=3, input_shape=(4,)), topologies.ring(5)

    class Linear(nn.Module):
        @nn.compact
        def __call__(self, inputs):
            return nn.Dense(3)(inputs)

    def init(key, example_inputs):
        return {"kernel": jnp.zeros((example_inputs.shape[-1], 3)), "bias": jnp.zeros(3)}

    def apply(params, inputs):
        return inputs @ params["kernel"] + params["bias"][None]

    start = init(None, data.train_inputs)
    flax = simulate(topology, data, model=Linear(), init={"Dense_0": start}, epochs=2, progress=False)
    pair = simulate(topology, data, model=(init, apply), epochs=2, progress=False)
    np.testing.assert_allclose(flax.params["Dense_0"]["kernel"], pair.params["kernel"], atol=1e-6)
    assert pair.history.accuracy[-1].mean() > 0.6


def test_methods_and_callable_objects_are_functions_too():
    class Apply:
        def __call__(self, params, inputs):
            return inputs @ params["params"]["kernel"]

    net = nn.Dense(10, use_bias=False)
    data, topology = datasets.synthetic(num_train=100), topologies.ring(5)
    one = simulate(topology, data, model=(net.init, net.apply), epochs=1, progress=False)
    two = simulate(topology, data, model=(net.init, Apply()), epochs=1, progress=False)
    np.testing.assert_allclose(one.history.loss, two.history.loss, rtol=1e-5)


class Perceptron(nnx.Module):
    def __init__(self, *, rngs, between=lambda x: x):
        self.first, self.last = nnx.Linear(16, 8, rngs=rngs), nnx.Linear(8, 10, rngs=rngs)
        self.between = between

    def __call__(self, inputs):
        return self.last(nnx.relu(self.between(self.first(inputs))))


def test_an_nnx_module_trains_like_the_linen_module_of_the_same_weights():
    data, topology = datasets.synthetic(num_train=100), topologies.ring(5)
    start = models.mlp((8,)).init(jax.random.key(1), data.train_inputs[:1])["params"]
    arguments = {"epochs": 2, "progress": False}
    ours = simulate(topology, data, model=models.mlp((8,)), init=start, **arguments)
    named = {"first": start["Dense_0"], "last": start["Dense_1"]}
    theirs = simulate(topology, data, model=Perceptron, init=named, **arguments)
    np.testing.assert_allclose(ours.params["Dense_1"]["kernel"], theirs.params["last"]["kernel"], atol=1e-5)
    independent = simulate(topology, data, model=lambda rngs: Perceptron(rngs=rngs), init="independent", **arguments)
    kernels = independent.params["first"]["kernel"]
    assert np.abs(kernels[0] - kernels[1]).max() > 0.01


def test_an_nnx_module_is_built_by_the_library():
    with pytest.raises(ValueError, match=r"built already: pass a function that builds it"):
        models.as_model(Perceptron(rngs=nnx.Rngs(0)))


def test_a_convolution_of_flax_works_and_the_faster_one_is_named_once():
    class Net(nn.Module):
        conv: Any = nn.Conv

        @nn.compact
        def __call__(self, inputs):
            return nn.Dense(10)(self.conv(4, (3, 3))(inputs).mean(axis=(1, 2)))

    data, arguments = datasets.synthetic(num_train=40, input_shape=(8, 8, 3)), {"rounds": 2, "progress": False}
    with pytest.warns(UserWarning, match=r"dcliques_jax\.layers\.Conv") as told:
        theirs = simulate(topologies.ring(4), data, model=Net(), **arguments)
    assert len(told) == 1
    ours = simulate(topologies.ring(4), data, model=Net(layers.Conv), **arguments)  # warnings are errors here
    np.testing.assert_allclose(ours.history.loss, theirs.history.loss, rtol=1e-4)


def test_another_loss_is_minimised_and_measured():
    """Squared error to one-hot targets, as in regression."""

    def squared_error(logits, labels):
        return jnp.square(logits - jax.nn.one_hot(labels, 10)).sum(axis=1)

    data, topology = datasets.synthetic(num_train=100), topologies.fully_connected(1)
    arguments = {"batch_size": 100, "rounds": 3, "progress": False, "init": "shared"}
    result = simulate(topology, data, loss_fn=squared_error, algorithm=algorithms.dsgd(optax.sgd(0.01)), **arguments)
    start = simulate(topology, data, **arguments | {"rounds": 0}).params["Dense_0"]
    kernel, bias = (np.asarray(start[name][0], np.float64) for name in ("kernel", "bias"))
    x, y = data.train_inputs.astype(np.float64), np.eye(10)[data.train_labels]
    for _ in range(3):
        error = 2 * (x @ kernel + bias - y) / len(x)
        kernel, bias = kernel - 0.01 * x.T @ error, bias - 0.01 * error.sum(axis=0)
    np.testing.assert_allclose(result.params["Dense_0"]["kernel"][0], kernel, atol=1e-5)
    test = np.square(data.test_inputs @ kernel + bias - np.eye(10)[data.test_labels]).sum(axis=1).mean()
    np.testing.assert_allclose(result.history.loss[-1], test, rtol=1e-5)


@pytest.mark.parametrize("loss_fn", [lambda *_: 0.0, lambda *batch: metrics.cross_entropy(*batch).mean()])
def test_a_loss_must_have_one_value_an_example(loss_fn):
    with pytest.raises(ValueError, match="it must return one loss per example, not a mean"):
        simulate(topologies.ring(5), datasets.synthetic(), loss_fn=loss_fn, progress=False)


def test_learning_rates_may_follow_a_schedule():
    schedule = optax.piecewise_constant_schedule(0.1, {2: 0.0})  # nothing moves after two rounds
    data, arguments = datasets.synthetic(num_train=100), {"batch_size": 5, "progress": False}
    scheduled = algorithms.dsgd(optax.sgd(schedule))
    short = simulate(topologies.fully_connected(5), data, algorithm=scheduled, rounds=2, **arguments)
    long = simulate(topologies.fully_connected(5), data, algorithm=scheduled, rounds=6, **arguments)
    np.testing.assert_allclose(short.params["Dense_0"]["kernel"], long.params["Dense_0"]["kernel"], atol=1e-6)


@pytest.mark.parametrize("model", ["logistic", 3, (1, 2), lambda x: x])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ValueError, match=r"is not a model\. Pass a flax\.linen module"):
        models.as_model(model)


@pytest.mark.parametrize("shape", [(784,), (14, 32, 3)])
def test_gn_lenet_needs_images(shape):
    data = datasets.synthetic(num_train=100, input_shape=shape)
    with pytest.raises(ValueError, match=r"gn_lenet takes images .* of at least 15 x 15"):
        simulate(topologies.ring(5), data, model=models.gn_lenet(), progress=False)


def test_a_model_must_treat_every_example():
    model = (lambda key, x: {"w": jnp.zeros((16, 10))}, lambda params, x: x[:1] @ params["w"])
    with pytest.raises(ValueError, match=r"logits of shape \(1, 10\) for two examples"):
        simulate(topologies.ring(5), datasets.synthetic(), model=model, progress=False)


def test_a_model_must_fit_the_classes():
    with pytest.raises(ValueError, match=r"logits of shape \(2, 7\) for two examples of 10 classes"):
        simulate(topologies.ring(5), datasets.synthetic(), model=models.logistic_regression(7), progress=False)
