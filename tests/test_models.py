import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from dcliques_jax import datasets, models, simulate, topologies


@pytest.mark.usefixtures("x64")
def test_gn_lenet_equals_the_reference():
    model = models.as_model(models.gn_lenet())
    images = jax.random.normal(jax.random.key(1), (2, 32, 32, 3), jnp.float64)
    params = model.init(jax.random.key(0), images)
    # Scales and shifts of the norms start at 1 and 0: random ones show that they are used.
    keys = iter(jax.random.split(jax.random.key(2), 20))
    params = jax.tree.map(lambda leaf: leaf + jax.random.normal(next(keys), leaf.shape, jnp.float64) * 0.1, params)
    expected = reference.gn_lenet(jax.tree.map(np.asarray, params), np.asarray(images))
    np.testing.assert_allclose(model.apply(params, images), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("build", "shape", "fans"),
    [
        (models.logistic_regression, (28, 28, 1), {"Dense_0": 784}),
        (models.gn_lenet, (32, 32, 3), {"Conv_0": 75, "Conv_1": 800, "Conv_2": 800, "Dense_0": 576}),
    ],
)
def test_weights_and_biases_start_uniform(build, shape, fans):
    params = models.as_model(build()).init(jax.random.key(0), jnp.zeros((1, *shape)))
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


def test_models_with_state_are_refused():
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, inputs):
            return nn.Dense(10)(nn.BatchNorm(use_running_average=False)(inputs))

    with pytest.raises(ValueError, match=r"Normed keeps batch_stats besides its parameters.*GroupNorm"):
        simulate(topologies.ring(5), datasets.synthetic(num_train=100), model=Normed(), progress=False)


@pytest.mark.parametrize("model", ["logistic", 3, (1, 2), lambda x: x])
def test_what_is_no_model_is_refused(model):
    with pytest.raises(ValueError, match=r"is not a model: pass a flax\.linen module"):
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
