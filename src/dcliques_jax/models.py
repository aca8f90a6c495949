"""One node's model.

Models are written for one node. The simulator lifts them over all nodes with `jax.vmap`.
"""

import dataclasses
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax

from dcliques_jax import _checks, layers
from dcliques_jax._models import parts
from dcliques_jax._models.contract import Model as Model
from dcliques_jax._models.contract import StatefulModel as StatefulModel
from dcliques_jax._models.contract import without_state
from dcliques_jax._models.flax_modules import from_linen, from_nnx, is_nnx
from dcliques_jax._models.residual import ResNet
from dcliques_jax._models.vgg import VGG11

Params = Any


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

    >>> num_parameters(mlp((200,)), jax.numpy.zeros((1, 28, 28, 1)))
    159010
    """
    return MLP(tuple(_checks.integer("hidden", size, 1) for size in hidden), num_classes)


def resnet20(num_classes: int = 10, *, norm: str = "group", shortcut: str = "B", groups: int = 2) -> nn.Module:
    """Makes ResNet-20 for CIFAR-10 (He et al., 2015): 272,474 parameters, or 269,722 with shortcut A.

    Args:
      num_classes: number of classes.
      norm: `"batch"`, with the conventions of PyTorch; `"group"`; or `"evonorm"`, as QGM and RelaySGD (EPFL) use it:
        EvoNorm in the stem and after the first convolution of a block, and before sums batch normalisation by the
        statistics of the current batch, in evaluation as well.
      shortcut: where channels double, `"B"`: a 1 x 1 convolution with normalisation, as EPFL and Purdue; `"A"`: every
        second pixel and zeros for new channels, as He et al. and EquiTopo. Convolutions start from N(0, 2 / (k^2
        c_out)) with B and from N(0, 2 / (k^2 c_in)) with A.
      groups: number of groups of group normalisation.

    >>> num_parameters(resnet20(), jax.numpy.zeros((1, 32, 32, 3)))
    272474
    """
    return _resnet((16, 32, 64), 3, num_classes, norm, shortcut, groups)


def resnet18(num_classes: int = 10, *, norm: str = "group", shortcut: str = "B", groups: int = 2) -> nn.Module:
    """Makes ResNet-18 with a 3 x 3 stem, for small images (11,173,962 parameters); for arguments see `resnet20`.

    >>> num_parameters(resnet18(), jax.numpy.zeros((1, 32, 32, 3)))
    11173962
    """
    return _resnet((64, 128, 256, 512), 2, num_classes, norm, shortcut, groups)


def _resnet(widths: tuple[int, ...], blocks: int, num_classes: int, norm: str, shortcut: str, groups: int) -> nn.Module:
    _checks.choice("norm", norm, ("batch", "group", "evonorm"))
    _checks.choice("shortcut", shortcut, ("A", "B"))
    groups = _checks.integer("groups", groups, 1, widths[0], "the channels of the first stage")
    return ResNet(widths, blocks, num_classes, norm, shortcut, groups)


def vgg11(num_classes: int = 10, *, norm: str = "none", groups: int = 8, dropout: float = 0.5) -> nn.Module:
    """Makes VGG-11 for images of 32 x 32: eight convolutions and five pools.

    Args:
      num_classes: number of classes.
      norm: `"none"` (9,750,922 parameters) or `"batch"` (9,756,426): three linear layers with dropout before the first
        two, as QGM and RelaySGD; `"group"` (9,231,114): one linear layer, as Takezawa et al.
      groups: number of groups of group normalisation.
      dropout: share of the inputs of the first two linear layers that are dropped in training.

    >>> num_parameters(vgg11(), jax.numpy.zeros((1, 32, 32, 3)))
    9750922
    """
    _checks.choice("norm", norm, ("none", "batch", "group"))
    groups = _checks.integer("groups", groups, 1, 64, "the channels of the first convolution")
    return VGG11(num_classes, norm, groups, _checks.share("dropout", dropout))


class LogisticRegression(nn.Module):
    """One linear layer; see `logistic_regression`."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits [batch, classes] of inputs [batch, ...]."""
        return parts.dense(self.num_classes, inputs.reshape(len(inputs), -1))


class MLP(nn.Module):
    """Linear layers with ReLU between them; see `mlp`."""

    hidden: tuple[int, ...]
    num_classes: int = 10

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits [batch, classes] of inputs [batch, ...]."""
        x = inputs.reshape(len(inputs), -1)
        for size in self.hidden:
            x = nn.relu(parts.dense(size, x))
        return parts.dense(self.num_classes, x)


class GNLeNet(nn.Module):
    """LeNet with group normalisation; see `gn_lenet`."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, channels]."""
        parts.check_images("gn_lenet", inputs, 15)

        def normalise(x: jax.Array) -> jax.Array:
            return layers.GroupNorm(num_groups=2, epsilon=1e-5)(x)

        x = nn.relu(normalise(_pool(_conv(32, inputs))))
        x = nn.relu(_pool(normalise(_conv(32, x))))
        x = nn.relu(_pool(normalise(_conv(64, x))))
        return parts.dense(self.num_classes, x.reshape(len(x), -1))


def with_statistics(model: Any, *, gossip: bool = False, calibration_batches: int = 0) -> StatefulModel:
    """Chooses what becomes of a model's state, such as the running statistics of batch normalisation.

    By default every node keeps its own state, and the mean model has the mean of all states.

    Args:
      model: a model as in `simulate`.
      gossip: whether nodes mix their states in every round over the matrix W, as they mix parameters.
      calibration_batches: number of batches of training examples, drawn once from all nodes, on which the state of the
        mean model is estimated at every evaluation: the state after passes over them in training mode, from the mean of
        all states on. Default: the mean itself.

    >>> with_statistics(logistic_regression(), gossip=True).gossip_state
    True
    """
    if not isinstance(gossip, bool):
        raise ValueError(f"gossip={gossip!r} must be True or False")
    count = _checks.integer("calibration_batches", calibration_batches, 0)
    return as_model(model)._replace(gossip_state=gossip, calibration_batches=count, name=_name(model))


def predictor(model: Any) -> Callable[..., jax.Array]:
    """Returns the function `(params, inputs) -> outputs` of a model in evaluation.

    If the model has a state, the function is `(params, state, inputs) -> outputs`.

    Args:
      model: a model as in `simulate`.

    >>> model = logistic_regression()
    >>> params, _ = as_model(model).init(jax.random.key(0), jax.numpy.zeros((1, 4)))
    >>> predictor(model)(params, jax.numpy.zeros((3, 4))).shape
    (3, 10)
    """
    apply = as_model(model).apply

    def predict(params: Params, *state_and_inputs: Any) -> jax.Array:
        *state, inputs = state_and_inputs
        outputs: jax.Array = apply(params, state[0] if state else {}, inputs, train=False, key=None)[0]
        return outputs

    return predict


def as_model(model: Any) -> StatefulModel:
    """Converts the `model` of `simulate` to a `StatefulModel`, whose state may be empty.

    Args:
      model: a flax.linen module, a function of `rngs` that builds a flax.nnx module, or a pair of functions
        `(init, apply)` as in `Model` or `StatefulModel`.
    """
    if isinstance(model, nn.Module):
        return from_linen(model)
    if isinstance(model, StatefulModel):
        return model
    if isinstance(model, tuple) and len(model) == 2 and all(callable(function) for function in model):
        return _from_pair(*model)
    if callable(model) and not is_nnx(model):
        call = model.__init__ if isinstance(model, type) else model  # type: ignore[misc]
        if "rngs" in inspect.signature(call).parameters:
            return from_nnx(model)
    built = " It is built already: pass a function that builds it, such as lambda rngs: ..." if is_nnx(model) else ""
    raise ValueError(
        f"model={model!r} is not a model.{built} Pass a flax.linen module such as models.logistic_regression(), a "
        "function that builds a flax.nnx module such as lambda rngs: MyModule(rngs=rngs), or a pair of functions "
        "(init(key, example_inputs) -> params, apply(params, inputs) -> outputs)"
    )


def _from_pair(init: Any, apply: Any) -> StatefulModel:
    """Tells the two forms of pairs apart by the arguments of `apply`."""
    try:
        named = inspect.signature(apply).parameters.keys() & {"train", "key"}
    except ValueError:  # a function without a signature
        named = set()
    if len(named) == 1:
        raise ValueError(
            f"apply takes {named.pop()!r} alone: pass apply(params, inputs) -> outputs, or, for a model with state or "
            "randomness, apply(params, state, inputs, *, train, key) -> (outputs, state)"
        )
    return StatefulModel(init, apply) if named else without_state(Model(init, apply))


def described(model: Any, state: Any = ()) -> str:
    """Describes a model in one line, with what becomes of its state.

    Args:
      model: a model as in `simulate`.
      state: the state of one node's model, or its shapes. If there is any, the defaults of `with_statistics` are told.

    >>> described(logistic_regression(4)), described(with_statistics(logistic_regression(4), gossip=True))
    ('LogisticRegression(num_classes=4)', 'LogisticRegression(num_classes=4), state gossiped')
    """
    gossiped, batches = False, 0
    if isinstance(model, StatefulModel):
        gossiped, batches = model.gossip_state, model.calibration_batches
    kept = "state gossiped" if gossiped else "state local"
    found = f"calibrated on {batches} batches" if batches else "averaged in the mean model"
    any_state = bool(jax.tree.leaves(state))
    return ", ".join([_name(model), *[kept] * (gossiped or any_state), *[found] * (batches > 0 or any_state)])


def _name(model: Any) -> str:
    """Returns the name of a module with its fields, or the names of functions."""
    if isinstance(model, StatefulModel):
        return model.name or _name(model[:2])
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

    >>> num_parameters(gn_lenet(), jax.numpy.zeros((1, 32, 32, 3)))
    85354
    """
    params, _ = jax.eval_shape(as_model(model).init, jax.random.key(0), example_inputs)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


def _conv(features: int, x: jax.Array) -> jax.Array:
    start = parts.uniform(5 * 5 * x.shape[-1])
    return layers.Conv(features, (5, 5), padding=2, kernel_init=start, bias_init=start)(x)


def _pool(x: jax.Array) -> jax.Array:
    return layers.max_pool(x, (3, 3), strides=(2, 2))
