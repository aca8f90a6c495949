"""One node's model.

Models are written for one node. The simulator lifts them over all nodes with `jax.vmap`.
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp

from dcliques_jax import _checks, layers

Params = Any


class Model(NamedTuple):
    """A pair of pure functions. Any such pair is a model."""

    init: Callable[[jax.Array, jax.Array], Params]  # (key, example_inputs [batch, ...]) -> params
    apply: Callable[[Params, jax.Array], jax.Array]  # (params, inputs [batch, ...]) -> logits [batch, classes]


def logistic_regression(num_classes: int = 10) -> nn.Module:
    """Makes the paper's model for MNIST: one linear layer with bias on the flattened inputs (7,850 parameters).

    Weights and biases start uniform in +-1/sqrt(fan_in).
    """
    return LogisticRegression(num_classes)


def gn_lenet(num_classes: int = 10) -> nn.Module:
    """Makes the paper's model for CIFAR-10: LeNet with group normalisation (85,354 parameters on 32 x 32 x 3).

    It has three 5 x 5 convolutions (32, 32, 64 channels), each followed by group normalisation in two groups and a
    3 x 3 max-pool of stride 2, and one linear layer. As in the reference experiments, only the first convolution is
    pooled before it is normalised. Weights and biases start uniform in +-1/sqrt(fan_in).
    """
    return GNLeNet(num_classes)


def mlp(hidden: Sequence[int] = (200,), num_classes: int = 10) -> nn.Module:
    """Makes a perceptron with hidden layers and ReLU between them, on the flattened inputs.

    Weights and biases start uniform in +-1/sqrt(fan_in).

    Args:
      hidden: sizes of the hidden layers.
      num_classes: number of classes.

    >>> num_parameters(mlp((200,)), jnp.zeros((1, 28, 28, 1)))
    159010
    """
    return MLP(tuple(_checks.integer("hidden", size, 1) for size in hidden), num_classes)


class LogisticRegression(nn.Module):
    """One linear layer; see `logistic_regression`."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits [batch, classes] of inputs [batch, ...]."""
        return _dense(self.num_classes, inputs.reshape(len(inputs), -1))


class MLP(nn.Module):
    """Linear layers with ReLU between them; see `mlp`."""

    hidden: tuple[int, ...]
    num_classes: int = 10

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits [batch, classes] of inputs [batch, ...]."""
        x = inputs.reshape(len(inputs), -1)
        for size in self.hidden:
            x = nn.relu(_dense(size, x))
        return _dense(self.num_classes, x)


class GNLeNet(nn.Module):
    """LeNet with group normalisation; see `gn_lenet`."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, channels]."""
        if inputs.ndim != 4 or min(inputs.shape[1:3]) < 15:
            raise ValueError(
                f"gn_lenet takes images [height, width, channels] of at least 15 x 15, not inputs {inputs.shape[1:]}"
            )

        def normalise(x: jax.Array) -> jax.Array:
            return layers.GroupNorm(num_groups=2, epsilon=1e-5)(x)

        x = nn.relu(normalise(_pool(_conv(32, inputs))))
        x = nn.relu(_pool(normalise(_conv(32, x))))
        x = nn.relu(_pool(normalise(_conv(64, x))))
        return _dense(self.num_classes, x.reshape(len(x), -1))


def as_model(model: Any) -> Model:
    """Converts the `model` of `simulate` to a `Model`.

    Args:
      model: a flax.linen module, a function of `rngs` that builds a flax.nnx module, or a pair of functions
        `(init, apply)`.
    """
    if isinstance(model, nn.Module):
        return _from_linen(model)
    if isinstance(model, tuple) and len(model) == 2 and all(callable(function) for function in model):
        return Model(*model)
    if callable(model) and not _is_nnx(model):
        call = model.__init__ if isinstance(model, type) else model  # type: ignore[misc]
        if "rngs" in inspect.signature(call).parameters:
            return _from_nnx(model)
    built = " It is built already: pass a function that builds it, such as lambda rngs: ..." if _is_nnx(model) else ""
    raise ValueError(
        f"model={model!r} is not a model.{built} Pass a flax.linen module such as models.logistic_regression(), a "
        "function that builds a flax.nnx module such as lambda rngs: MyModule(rngs=rngs), or a pair of functions "
        "(init(key, example_inputs) -> params, apply(params, inputs) -> logits)"
    )


def described(model: Any) -> str:
    """Describes a model in one line.

    >>> described(logistic_regression(4))
    'LogisticRegression(num_classes=4)'
    """
    if isinstance(model, nn.Module):
        names = [field.name for field in dataclasses.fields(model) if field.init]
        fields = (f"{name}={getattr(model, name)!r}" for name in names if name not in ("parent", "name"))
        return re.sub(
            r" at 0x[0-9a-f]+", "", f"{type(model).__name__}({', '.join(fields)})"
        )  # without addresses, which differ between processes
    functions = model if isinstance(model, tuple) else (model,)
    return ", ".join(getattr(function, "__qualname__", type(function).__name__) for function in functions)


def num_parameters(model: Any, example_inputs: Any) -> int:
    """Counts the parameters of a model.

    Args:
      model: a model as in `simulate`.
      example_inputs: inputs `[batch, ...]` of the shape that the model gets.

    >>> num_parameters(gn_lenet(), jnp.zeros((1, 32, 32, 3)))
    85354
    """
    params = jax.eval_shape(as_model(model).init, jax.random.key(0), example_inputs)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


_STATELESS = (
    "but rounds average parameters only: use a module without it, for example with GroupNorm instead of BatchNorm and "
    "with dropout switched off"
)


def _from_linen(module: nn.Module) -> Model:
    name = type(module).__name__

    def init(key: jax.Array, example_inputs: jax.Array) -> Params:
        variables = module.init(key, example_inputs)
        if others := set(variables) - {"params"}:
            raise ValueError(f"{name} keeps {', '.join(sorted(others))} besides its parameters, {_STATELESS}")
        return variables.get("params", {})

    def apply(params: Params, inputs: jax.Array) -> jax.Array:
        try:
            logits: jax.Array = module.apply({"params": params}, inputs)
        except flax.errors.InvalidRngError as error:
            raise ValueError(f"{name} draws random numbers as it is applied, like dropout, {_STATELESS}") from error
        return logits

    return Model(init, apply)


def _is_nnx(model: Any) -> bool:
    """Whether a model is an nnx module. Does not import flax.nnx, which takes long."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


def _from_nnx(build: Callable[..., Any]) -> Model:
    from flax import nnx

    def split(key: jax.Array) -> Any:
        definition, params, others = nnx.split(build(rngs=nnx.Rngs(key)), nnx.Param, ...)
        kept = jax.tree.leaves(others, is_leaf=lambda value: isinstance(value, nnx.Variable))
        if kinds := sorted({type(variable).__name__ for variable in kept}):
            name = getattr(build, "__name__", "the module")
            raise ValueError(f"{name} keeps {', '.join(kinds)} besides its parameters, {_STATELESS}")
        return definition, params

    def init(key: jax.Array, example_inputs: jax.Array) -> Params:
        return nnx.to_pure_dict(split(key)[1])

    def apply(params: Params, inputs: jax.Array) -> jax.Array:
        # eval_shape finds the structure without any computation.
        definition, state = jax.eval_shape(split, jax.random.key(0))
        nnx.replace_by_pure_dict(state, params)
        logits: jax.Array = nnx.merge(definition, state)(inputs)
        return logits

    return Model(init, apply)


def _uniform(fan_in: int) -> Callable[..., jax.Array]:
    """Initialises with U(-1/sqrt(fan_in), 1/sqrt(fan_in)), weights and biases alike."""

    def init(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        bound = fan_in**-0.5
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def _dense(features: int, x: jax.Array) -> jax.Array:
    start = _uniform(x.shape[-1])
    return layers.Dense(features, kernel_init=start, bias_init=start)(x)


def _conv(features: int, x: jax.Array) -> jax.Array:
    start = _uniform(5 * 5 * x.shape[-1])
    return layers.Conv(features, (5, 5), padding=2, kernel_init=start, bias_init=start)(x)


def _pool(x: jax.Array) -> jax.Array:
    return layers.max_pool(x, (3, 3), strides=(2, 2))
