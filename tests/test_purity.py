"""A run is a pure function of its arguments: what a function reads counts as it is when the run starts."""

import collections
import functools
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import monitoring
from dcliques_jax import algorithms, datasets, layers, models, partitions, simulate, topologies
from dcliques_jax._executables import Parts
from dcliques_jax.metrics import cross_entropy

DATA = datasets.synthetic(num_train=200, num_test=20, num_classes=4, input_shape=(5,), seed=1)
SHARDS = partitions.shards(DATA, 10, seed=1)


def run(**arguments):
    return simulate(topologies.ring(10), SHARDS, epochs=2, progress=False, **arguments)


def with_namespace():
    args = types.SimpleNamespace(temp=1.0)
    return {"loss_fn": lambda logits, labels: cross_entropy(logits / args.temp, labels)}, vars(args)


def with_array():
    temp = np.ones(())

    class Setter(dict):
        def __setitem__(self, _, value):
            temp[...] = value

    return {"loss_fn": lambda logits, labels: cross_entropy(logits / temp, labels)}, Setter()


def with_own_module():
    own = types.ModuleType("own")
    own.temp = 1.0
    scope = {"own": own, "cross_entropy": cross_entropy}
    exec("def loss_fn(logits, labels): return cross_entropy(logits / own.temp, labels)", scope)
    return {"loss_fn": scope["loss_fn"]}, vars(own)


def with_callable_object():
    class Loss:
        temp = 1.0

        def __call__(self, logits, labels):
            return cross_entropy(logits / self.temp, labels)

    loss = Loss()
    return {"loss_fn": loss}, vars(loss)


def with_attribute_of_a_function():
    def loss_fn(logits, labels):
        return cross_entropy(logits / loss_fn.temp, labels)

    loss_fn.temp = 1.0
    return {"loss_fn": loss_fn}, vars(loss_fn)


def with_jitted_function():
    args = types.SimpleNamespace(temp=1.0)
    return {"loss_fn": jax.jit(lambda logits, labels: cross_entropy(logits / args.temp, labels))}, vars(args)


def with_body_of_a_loop():
    args = types.SimpleNamespace(temp=1.0)

    def body(row):
        return row / args.temp

    return {"loss_fn": lambda logits, labels: cross_entropy(jax.lax.map(body, logits), labels)}, vars(args)


def with_private_attribute_of_a_flax_module():
    args = {"temp": 1.0}

    class Net(nn.Module):
        _temp = 1.0

        @nn.compact
        def __call__(self, inputs):
            return nn.Dense(4)(inputs) / self._temp

    class Setter(dict):
        def __setitem__(self, _, value):
            Net._temp = value

    return {"model": Net()}, Setter(args)


def with_algorithm():
    args = types.SimpleNamespace(temp=1.0)
    inner = algorithms.dsgd()

    def step(params, gradients, state):
        return inner.step(params, jax.tree.map(lambda leaf: leaf / args.temp, gradients), state)

    return {"algorithm": inner._replace(step=step)}, vars(args)


def with_initial_model():
    args = types.SimpleNamespace(temp=1.0)

    def init(key, inputs):
        return {"w": args.temp * jax.random.normal(key, (5, 4))}

    return {"model": (init, lambda params, inputs: inputs @ params["w"])}, vars(args)


CASES = [value for name, value in list(globals().items()) if name.startswith("with_")]


@pytest.mark.parametrize("build", CASES)
def test_what_a_function_reads_counts_as_it_is_when_the_run_starts(build):
    arguments, values = build()
    first = run(**arguments)
    values["temp"] = 10.0
    changed = run(**arguments)
    assert (changed.history.loss[-1] != first.history.loss[-1]).all()
    fresh, values_of_fresh = build()
    values_of_fresh["temp"] = 10.0
    jax.tree.map(np.testing.assert_array_equal, changed.params, run(**fresh).params)


@pytest.mark.parametrize("build", [case for case in CASES if case is not with_initial_model])
def test_the_checksum_tells_such_programs_apart(build):
    arguments, values = build()
    first = run(**arguments).provenance["program"]
    values["temp"] = 10.0
    assert run(**arguments).provenance["program"] != first
    values["temp"] = 1.0
    assert run(**arguments).provenance["program"] == first


@pytest.mark.parametrize("build", CASES)
def test_a_checkpoint_of_another_value_is_refused(build, tmp_path):
    arguments, values = build()
    run(checkpoint_dir=tmp_path, **arguments)
    values["temp"] = 10.0
    with pytest.raises(ValueError, match=r"checkpoints of another run"):
        run(checkpoint_dir=tmp_path, **arguments)


@pytest.mark.parametrize("build", CASES)
def test_programs_of_the_same_text_are_compiled_once(build):
    arguments, _ = build()
    run(**arguments)
    again, _ = build()
    with monitoring.compilations() as compiled:
        run(**again)
    assert compiled == []


class Net(nn.Module):
    @nn.compact
    def __call__(self, inputs):
        return nn.Dense(4)(inputs)


BY_VALUE = [
    lambda number: optax.sgd(0.1 * number, momentum=0.9),
    lambda number: optax.chain(optax.clip(1.0), optax.adam(optax.cosine_decay_schedule(0.1 * number, 400))),
    lambda number: algorithms.dsgd(optax.sgd(0.1 * number)).step,
    lambda number: models.as_model(models.mlp((number,))),
    lambda number: models.as_model(layers.Dense(number, kernel_init=nn.initializers.zeros)),
    lambda number: functools.partial(jax.nn.relu, jax.nn.gelu, number),
    lambda number: {"a": (cross_entropy, [number])},
]


@pytest.mark.parametrize("build", BY_VALUE)
def test_what_comes_from_installed_packages_is_compared_by_value(build):
    assert Parts(build(2)) == Parts(build(2))
    assert hash(Parts(build(2))) == hash(Parts(build(2)))
    assert Parts(build(2)) != Parts(build(3))
    assert Parts((1, build)) != Parts((1.0, build))


OWN = [
    lambda logits, labels: cross_entropy(logits, labels),
    optax.sgd(lambda _: 0.1),
    models.as_model(Net()),
    jax.jit(lambda x: x),
    np.ones(2),
    jnp.ones(2),
    {1, 2},
    types.SimpleNamespace(a=1),
    collections.namedtuple("Own", "a")(1),
]


@pytest.mark.parametrize("value", OWN, ids=range(len(OWN)))
def test_what_may_change_unnoticed_is_not(value):
    assert Parts((cross_entropy, value)) != Parts((cross_entropy, value))


def test_known_programs_are_not_traced_again():
    def known():
        return run(model=models.logistic_regression(4), algorithm=algorithms.dsgd(optax.sgd(0.1)))

    known()
    with monitoring.traces() as names:
        known()
    assert not {"run", "evaluate", "random_params"} & set(names)
    own = Net()
    run(model=own)
    with monitoring.traces() as names:
        run(model=own)
    assert {"run", "evaluate", "random_params"} <= set(names)


def test_numbers_in_arrays_are_no_part_of_the_comparison_by_value():
    """An array in an optimiser's closure is read anew."""
    rate = np.array(0.1, np.float32)
    algorithm = algorithms.dsgd(optax.sgd(lambda _: jnp.asarray(rate)))
    first = run(algorithm=algorithm)
    rate[...] = 0.0
    still = run(algorithm=algorithm)
    assert (first.history.loss[0] != first.history.loss[-1]).any()
    np.testing.assert_array_equal(still.history.loss[0], still.history.loss[-1])
