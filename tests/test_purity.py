"""A run is a pure function of its arguments: what a function reads counts as it is when the run starts."""

import collections
import dataclasses
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
from dcliques_jax._engine.cache_key import StructuralKey
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

    def step(params, gradients, *others):
        return inner.step(params, jax.tree.map(lambda leaf: leaf / args.temp, gradients), *others)

    return {"algorithm": inner._replace(step=step)}, vars(args)


def with_initial_model():
    args = types.SimpleNamespace(temp=1.0)

    def init(key, inputs):
        return {"w": args.temp * jax.random.normal(key, (5, 4))}

    return {"model": (init, lambda params, inputs: inputs @ params["w"])}, vars(args)


CASES = [value for name, value in list(globals().items()) if name.startswith("with_")]


@pytest.mark.parametrize("build", CASES)
def test_what_a_function_reads_counts_as_it_is_when_the_run_starts(build, tmp_path):
    arguments, values = build()
    first = run(checkpoint_dir=tmp_path, **arguments)
    values["temp"] = 10.0
    with pytest.raises(ValueError, match="checkpoints of another run"):
        run(checkpoint_dir=tmp_path, **arguments)
    changed = run(**arguments)
    assert (changed.history.loss[-1] != first.history.loss[-1]).all()
    assert build is with_initial_model or changed.provenance["program"] != first.provenance["program"]
    fresh, values = build()
    values["temp"] = 10.0
    with monitoring.compilations() as compiled:
        again = run(**fresh)
    assert compiled == []  # programs of the same text are compiled once
    jax.tree.map(np.testing.assert_array_equal, changed.params, again.params)


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
    assert StructuralKey(build(2)) == StructuralKey(build(2))
    assert hash(StructuralKey(build(2))) == hash(StructuralKey(build(2)))
    assert StructuralKey(build(2)) != StructuralKey(build(3))
    assert StructuralKey((1, build)) != StructuralKey((1.0, build))


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
    assert StructuralKey((cross_entropy, value)) != StructuralKey((cross_entropy, value))


def test_known_programs_are_not_traced_again():
    def known():
        return run(model=models.logistic_regression(4), algorithm=algorithms.dsgd(optax.sgd(0.1)))

    known()
    with monitoring.traces() as names:
        known()
    assert not {"run", "evaluate", "random_models"} & set(names)
    own = Net()
    run(model=own)
    with monitoring.traces() as names:
        run(model=own)
    assert {"run", "evaluate", "random_models"} <= set(names)


def test_numbers_in_arrays_are_no_part_of_the_comparison_by_value():
    """An array in an optimiser's closure is read anew."""
    rate = np.array(0.1, np.float32)
    algorithm = algorithms.dsgd(optax.sgd(lambda _: jnp.asarray(rate)))
    first = run(algorithm=algorithm)
    rate[...] = 0.0
    still = run(algorithm=algorithm)
    assert (first.history.loss[0] != first.history.loss[-1]).any()
    np.testing.assert_array_equal(still.history.loss[0], still.history.loss[-1])


# What the text of a program does not tell


def test_functions_of_the_host_are_not_mixed_up():
    def loss(scale):
        def on_host(x):
            return np.float32(scale) * x

        def loss_fn(logits, labels):
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            factor = jax.pure_callback(on_host, shape, jnp.float32(1), vmap_method="sequential")
            return factor * cross_entropy(logits, labels)

        return loss_fn

    one, five = (run(loss_fn=loss(scale)).history.loss[0].mean() for scale in (1.0, 5.0))
    assert five == pytest.approx(5 * one, rel=1e-5)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    w: jax.Array
    scale: float = dataclasses.field(metadata={"static": True})


def test_constants_in_pytrees_are_part_of_a_program():
    def model(scale):
        def init(key, inputs):
            return Scaled(jax.random.normal(key, (5, 4)), scale)

        return init, lambda params, inputs: params.scale * (inputs @ params.w)

    one, five = (run(model=model(scale)) for scale in (1.0, 5.0))
    assert (one.params.scale, five.params.scale) == (1.0, 5.0)
    assert (one.history.loss[0] != five.history.loss[0]).all()


def test_names_in_pytrees_and_unused_arguments_are_part_of_a_program():
    def named(name):
        class Named(nn.Module):
            @nn.compact
            def __call__(self, inputs):
                return nn.Dense(4, name=name)(inputs)

        return Named()

    for name in ("fc", "out"):
        assert list(run(model=named(name)).params) == [name]
    for dtype in (np.float32, np.float16, np.int32):
        inputs = np.arange(200, dtype=dtype).reshape(40, 5) % 7
        dataset = datasets.from_arrays(inputs, np.arange(40) % 4, inputs, np.arange(40) % 4)
        simulate(topologies.ring(4), dataset, epochs=1, progress=False)


def test_a_wrapper_does_not_pass_for_what_it_wraps():
    args = types.SimpleNamespace(temp=1.0)

    @functools.wraps(cross_entropy)
    def loss_fn(logits, labels):
        return args.temp * cross_entropy(logits, labels)

    first = run(loss_fn=loss_fn)
    args.temp = 5.0
    assert (run(loss_fn=loss_fn).history.loss[0] != first.history.loss[0]).all()
