"""Schedules in epochs, and SGD as PyTorch has it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dcliques_jax import schedules


def test_the_cosine_is_that_of_the_formula():
    schedule = schedules.in_epochs(0.1, 7, epochs=50, warm_up=10, start=5e-5, cosine=True, end=1e-4)
    for count in range(0, 7 * 55, 13):
        epoch = count / 7
        expected = 5e-5 + (0.1 - 5e-5) * epoch / 10
        if epoch >= 10:
            expected = 1e-4 + (0.1 - 1e-4) * (1 + np.cos(np.pi * min((epoch - 10) / 40, 1))) / 2
        assert float(schedule(count)) == pytest.approx(expected, rel=1e-5)


def test_schedules_are_traced():
    schedule = schedules.in_epochs(1.0, 4, epochs=20, warm_up=2, drops=[10, 15])
    found = jax.jit(jax.vmap(schedule))(jnp.arange(0, 80, 4))
    expected = [0, 0.5] + [1.0] * 8 + [0.1] * 5 + [0.01] * 5
    np.testing.assert_allclose(found, expected, rtol=1e-5)


# Numbers for PyTorch: parameters, gradients of three rounds, and the parameters after them.
PARAMS = {"kernel": [[0.5, -1.25], [2.0, 0.75]], "bias": [0.1, -0.4], "scale": [1.5, 0.8]}
GRADIENTS = [
    {"kernel": [[0.3, -0.2], [0.7, 1.1]], "bias": [0.5, -0.6], "scale": [-0.9, 0.4]},
    {"kernel": [[-0.8, 0.6], [0.1, -0.4]], "bias": [1.2, 0.2], "scale": [0.3, -0.7]},
    {"kernel": [[0.9, 0.5], [-1.3, 0.2]], "bias": [-0.3, 0.8], "scale": [0.6, 1.0]},
]
PLAIN = {
    "kernel": [[0.4779313802719116, -1.3528095483779907], [1.9103654623031616, 0.504073977470398]],
    "bias": [-0.23350000381469727, -0.3553999960422516],
    "scale": [1.62690007686615, 0.7245999574661255],
}
NESTEROV = {
    "kernel": [[0.43863239884376526, -1.4287654161453247], [1.9638563394546509, 0.4370712637901306]],
    "bias": [-0.34015002846717834, -0.3998599946498871],
    "scale": [1.6142100095748901, 0.6621400713920593],
}


@pytest.mark.parametrize(("nesterov", "expected"), [(False, PLAIN), (True, NESTEROV)])
def test_sgd_is_that_of_pytorch(nesterov, expected):
    """Three steps of PyTorch 2.13: SGD(lr=.1, momentum=.9, weight_decay=.01), bias and scale in a group without."""
    optimizer = schedules.sgd(0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    params, *gradients = ({name: np.float32(each[name]) for name in PARAMS} for each in (PARAMS, *GRADIENTS))
    state = optimizer.init(params)
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    for name, value in expected.items():
        np.testing.assert_allclose(params[name], value, rtol=1e-6)


def test_rates_and_decays_are_swept():
    """Traced, they do what numbers do; and no decay has a state of the same structure as some."""
    rates = {"peak": 0.8, "start": 0.1, "end": 0.01}

    @jax.jit
    def traced(rates, decay):
        schedule = schedules.in_epochs(rates["peak"], 10, epochs=9, warm_up=2, start=rates["start"], drops=[5])
        cosine = schedules.in_epochs(rates["peak"], 10, epochs=9, cosine=True, end=rates["end"])
        decayed = schedules.sgd(1.0, weight_decay=decay)
        update, _ = decayed.update(jnp.ones((2, 2)), decayed.init(jnp.ones((2, 2))), jnp.ones((2, 2)))
        return schedule(10), schedule(60), cosine(90), update[0, 0]

    np.testing.assert_allclose(traced(rates, 0.5), [0.45, 0.08, 0.01, -1.5], rtol=1e-6)
    none, some = (schedules.sgd(0.1, momentum=0.9, weight_decay=decay).init(PARAMS) for decay in (0.0, 0.1))
    assert jax.tree.structure(none) == jax.tree.structure(some)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.in_epochs(-1, 1, epochs=1), "peak=-1"),
        (lambda: schedules.in_epochs(1, 0, epochs=1), "rounds_per_epoch=0"),
        (lambda: schedules.in_epochs(1, 1, epochs=2, warm_up=3), "warm_up=3 is longer than epochs=2"),
        (lambda: schedules.in_epochs(1, 1, epochs=2, drops=[1], cosine=True), "pass either, not both"),
        (lambda: schedules.sgd(0.1, weight_decay=-1), "weight_decay=-1"),
    ],
)
def test_impossible_schedules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
