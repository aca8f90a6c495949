"""Schedules in epochs, and SGD as PyTorch has it."""

import jax
import jax.numpy as jnp
import numpy as np
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


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_that_of_pytorch(nesterov):
    """Three steps of torch.optim.SGD(lr=.1, momentum=.9, weight_decay=.01), written out."""
    rng = np.random.default_rng(0)
    params = {"kernel": rng.normal(size=(3, 2)), "bias": rng.normal(size=2)}
    optimizer = schedules.sgd(0.1, momentum=0.9, nesterov=nesterov, weight_decay=0.01)
    state, found = optimizer.init(params), params
    buffers = {name: np.zeros_like(value) for name, value in params.items()}
    for _ in range(3):
        gradients = {name: rng.normal(size=value.shape) for name, value in params.items()}
        updates, state = optimizer.update(gradients, state, found)
        found = {name: found[name] + updates[name] for name in found}
        expected = {}
        for name, value in params.items():
            g = gradients[name] + (0.01 * value if name == "kernel" else 0)
            buffers[name] = 0.9 * buffers[name] + g
            expected[name] = value - 0.1 * (g + 0.9 * buffers[name] if nesterov else buffers[name])
        params = expected
    for name, value in params.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


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
