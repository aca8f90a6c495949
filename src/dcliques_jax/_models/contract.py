"""What the simulator needs of a model."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

Params = Any
State = Any


class Model(NamedTuple):
    """A pair of pure functions. Any such pair is a model that trains as it predicts."""

    init: Callable[[jax.Array, jax.Array], Params]  # (key, example_inputs [batch, ...]) -> params
    apply: Callable[[Params, jax.Array], jax.Array]  # (params, inputs [batch, ...]) -> outputs [batch, ...]


class StatefulModel(NamedTuple):
    """A model that trains otherwise than it predicts: with dropout, or with a state such as batch statistics.

    `apply` gets `train=True` and a key in rounds, and `train=False` and no key in evaluation, whose state is dropped.
    The key depends on the run, the round and the node. The state of a node is a pytree of its own.
    """

    init: Callable[[jax.Array, jax.Array], tuple[Params, State]]  # (key, example_inputs [batch, ...]) -> both
    apply: Callable[..., tuple[jax.Array, State]]  # (params, state, inputs, *, train, key) -> (outputs, state)
    gossip_state: bool = False  # whether nodes mix their states over W, as they mix parameters
    calibration_batches: int = 0  # number of training batches that estimate the mean model's state; 0: mean of states
    couples_examples: bool = False  # whether outputs depend on the whole batch; implied by a state
    draws: bool = True  # whether `apply` needs keys
    name: str = ""  # in results


def without_state(model: Model) -> StatefulModel:
    """Returns the same model in the other form, with an empty state."""

    def init(key: jax.Array, example_inputs: jax.Array) -> tuple[Params, State]:
        return model.init(key, example_inputs), ()

    def apply(
        params: Params, state: State, inputs: jax.Array, *, train: bool = False, key: jax.Array | None = None
    ) -> tuple[jax.Array, State]:
        del train, key
        return model.apply(params, inputs), state

    return StatefulModel(init, apply, draws=False)


def parts_of(params: Params, state: State) -> tuple[Any, ...]:
    """Returns the first arguments of metrics: the parameters, and the state if there is any."""
    return (params, state) if jax.tree.leaves(state) else (params,)
