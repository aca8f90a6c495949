"""Flax modules as pure functions."""

import dataclasses
import inspect
import sys
from collections.abc import Callable
from typing import Any

import flax.errors
import flax.linen as nn
import jax

from dcliques_jax._models.contract import Params, State, StatefulModel

# Arguments of `__call__`, and fields of modules, that tell whether a module trains; and their values if it does.
_MODES = {"train": True, "deterministic": False, "use_running_average": False}
# Other names for it. What their values mean is not known: the None of `training=None` may mean either.
_LIKE_MODES = ("training", "is_training", "is_train", "test", "is_test", "eval", "is_eval", "inference")


def from_linen(module: nn.Module) -> StatefulModel:
    """Converts a linen module. All collections but the parameters are its state."""
    name = type(module).__name__
    arguments = _modes_of(type(module).__call__, name)
    fields = [
        field.name for field in dataclasses.fields(module) if field.name in _MODES and field.name not in arguments
    ]

    def in_mode(train: bool) -> tuple[nn.Module, dict[str, bool]]:
        values = {mode: of_training == train for mode, of_training in _MODES.items()}
        built = module.clone(**{field: values[field] for field in fields}) if fields else module
        return built, {argument: values[argument] for argument in arguments}

    def init(key: jax.Array, example_inputs: jax.Array) -> tuple[Params, State]:
        built, values = in_mode(train=False)
        variables = dict(built.init(key, example_inputs, **values))
        if "batch_stats" in variables and not switched:
            raise ValueError(
                f"{name} keeps batch statistics but takes none of the arguments {', '.join(_MODES)}, so it would be "
                "evaluated as it trains: let __call__ take the argument train, and pass use_running_average=not train"
            )
        return variables.pop("params", {}), variables

    def apply(
        params: Params, state: State, inputs: jax.Array, *, train: bool = False, key: jax.Array | None = None
    ) -> tuple[jax.Array, State]:
        built, values = in_mode(train)
        variables, rngs = {"params": params, **dict(state)}, None if key is None else {"params": key}
        try:
            if not state:
                return built.apply(variables, inputs, rngs=rngs, **values), state
            outputs, changed = built.apply(variables, inputs, rngs=rngs, mutable=list(state), **values)
        except flax.errors.InvalidRngError as error:
            when = "as it is evaluated" if switched else "but takes none of the arguments " + ", ".join(_MODES)
            raise ValueError(
                f"{name} draws random numbers, like dropout, {when}: let __call__ take the argument train, and draw "
                "only if it is True"
            ) from error
        return outputs, dict(changed)

    switched = bool(arguments or fields)
    return StatefulModel(init, apply, couples_examples=getattr(module, "couples_examples", False), draws=switched)


def _modes_of(call: Any, name: str) -> list[str]:
    """Returns the arguments of a module's `__call__` that tell whether it trains; refuses those that may or may not."""
    found = []
    for argument in list(inspect.signature(call).parameters.values())[2:]:  # after the module and its inputs
        if argument.kind in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD):
            continue
        if argument.name in _MODES:
            found.append(argument.name)
        elif argument.name in _LIKE_MODES or argument.default is argument.empty or isinstance(argument.default, bool):
            raise ValueError(
                f"{name}.__call__ takes {argument.name!r}, and nothing says what to pass: of {', '.join(_MODES)} the "
                "simulator knows the values in rounds and in evaluation; rename the argument to one of them, or make "
                "a pair of functions (init, apply) that passes it"
            )
    return found


def is_nnx(model: Any) -> bool:
    """Whether a model is an nnx module. Does not import flax.nnx, which takes long."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


def from_nnx(build: Callable[..., Any]) -> StatefulModel:
    """Converts a function of `rngs` that builds an nnx module. All variables but parameters and keys are its state."""
    from flax import nnx

    name = getattr(build, "__name__", "the module")

    def split(key: jax.Array, train: bool) -> Any:
        module = build(rngs=nnx.Rngs(key))
        (module.train if train else module.eval)()
        return nnx.split(module, nnx.Param, nnx.RngState, ...)

    def shapes(train: bool) -> Any:
        """The structure, found without any computation."""
        return jax.eval_shape(lambda key: split(key, train), jax.random.key(0))

    built: Any = jax.eval_shape(lambda key: build(rngs=nnx.Rngs(key)), jax.random.key(0))
    arguments = _modes_of(type(built).__call__, name)

    def init(key: jax.Array, example_inputs: jax.Array) -> tuple[Params, State]:
        del example_inputs
        _, params, _, others = split(key, False)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(others)

    def apply(
        params: Params, state: State, inputs: jax.Array, *, train: bool = False, key: jax.Array | None = None
    ) -> tuple[jax.Array, State]:
        definition, own, streams, others = shapes(train)
        nnx.replace_by_pure_dict(own, params)
        nnx.replace_by_pure_dict(others, dict(state))
        module = nnx.merge(definition, own, _seeded(streams, key), others)
        outputs: jax.Array = module(inputs, **{name: _MODES[name] == train for name in arguments})
        return outputs, nnx.to_pure_dict(nnx.split(module, nnx.Param, nnx.RngState, ...)[3])

    streams, others = (jax.tree.leaves(part) for part in shapes(True)[2:])
    return StatefulModel(init, apply, draws=bool(streams or others or arguments))


def _seeded(streams: Any, key: jax.Array | None) -> Any:
    """Returns the streams of random numbers of an nnx module, begun anew from a key."""
    key = jax.random.key(0) if key is None else key  # in evaluation, where nothing is drawn
    leaves, structure = jax.tree.flatten(streams)
    begun = [
        jax.random.fold_in(key, number)
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else jax.numpy.zeros(leaf.shape, leaf.dtype)
        for number, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, begun)
