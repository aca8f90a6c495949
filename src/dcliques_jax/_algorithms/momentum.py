"""Momentum that nodes share: gossiped, or from the movement of mixed models."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dcliques_jax import _checks, mixing
from dcliques_jax._algorithms.contract import (
    Algorithm,
    Network,
    Params,
    Round,
    State,
    Traits,
    model_bytes,
    over_topology,
    sends,
    times,
)

Rate = float | jax.Array | Callable[[jax.Array], jax.Array]


def gossip_momentum(
    learning_rate: Rate = 0.1,
    momentum: float | jax.Array = 0.9,
    *,
    clique_averaging: bool | None = False,
    weights: Any = None,
) -> Algorithm:
    """Momentum that is gossiped with the models (DmSGD; Yu, Jin and Yang, 2019).

        M = b M + G,   X <- W (X - lr M),   M <- W M      M = 0 at first

    A message holds the model and the momentum.

    Args:
      learning_rate: the learning rate lr, or a schedule of optax, a function of the number of rounds so far.
      momentum: the factor b.
      clique_averaging: whether to average gradients over cliques, see `over_topology`.
      weights: gossip matrix W. Default: `topology.weights()`.

    >>> from dcliques_jax import datasets, partitions, simulate, topologies
    >>> data = partitions.shards(datasets.synthetic(), 10)
    >>> simulate(topologies.ring(10), data, algorithm=gossip_momentum(0.01), epochs=1, progress=False).history.round
    array([0, 4])
    """
    _check(learning_rate, momentum)

    def step(params: Params, gradients: Params, state: State, network: Network, round: Round) -> tuple[Params, State]:
        gradients = mixing.mix(network.gradients, gradients)
        rate = _rate(learning_rate, round)
        velocity = jax.tree.map(lambda m, g: times(momentum, m) + g, state, gradients)
        moved = jax.tree.map(lambda x, m: x - times(rate, m), params, velocity)
        return mixing.mix(network.gossip, (moved, velocity))

    traits = Traits(requires="rows", sends=sends(lambda params: 2 * model_bytes(params)))
    return Algorithm(over_topology(clique_averaging=clique_averaging, weights=weights), _zeros, step, traits)


def quasi_global_momentum(
    learning_rate: Rate = 0.1,
    momentum: float | jax.Array = 0.9,
    nesterov: bool = False,
    *,
    clique_averaging: bool | None = False,
    weights: Any = None,
) -> Algorithm:
    """Quasi-global momentum (Lin et al., ICML 2021): momentum from how far models move in a round, gossip included.

        M = b M' + G,   X+ = W (X - lr M),   M' <- b M' + (1 - b) (X - X+) / lr      M' = 0 at first

    With Nesterov momentum, G + b M takes the place of M in the step. Messages are models. It ends where `dsgd` ends at
    the same learning rate, and local momentum where `dsgd` ends at lr / (1 - b): choose the rate of each separately.

    Args:
      learning_rate: the learning rate lr, or a schedule of optax, a function of the number of rounds so far.
      momentum: the factor b.
      nesterov: whether to use Nesterov momentum.
      clique_averaging: whether to average gradients over cliques, see `over_topology`.
      weights: gossip matrix W. Default: `topology.weights()`.

    >>> from dcliques_jax import datasets, partitions, simulate, topologies
    >>> data = partitions.shards(datasets.synthetic(), 10)
    >>> algorithm = quasi_global_momentum(0.01, nesterov=True)
    >>> simulate(topologies.ring(10), data, algorithm=algorithm, epochs=1, progress=False).history.round
    array([0, 4])
    """
    _check(learning_rate, momentum)
    if not isinstance(nesterov, bool):
        raise ValueError(f"nesterov={nesterov!r} must be True or False")

    def step(params: Params, gradients: Params, state: State, network: Network, round: Round) -> tuple[Params, State]:
        gradients = mixing.mix(network.gradients, gradients)
        rate = _rate(learning_rate, round)
        direction = jax.tree.map(lambda m, g: times(momentum, m) + g, state, gradients)
        if nesterov:
            direction = jax.tree.map(lambda m, g: g + times(momentum, m), direction, gradients)
        after = mixing.mix(network.gossip, jax.tree.map(lambda x, m: x - times(rate, m), params, direction))
        per_rate = jnp.where(rate > 0, (1 - momentum) / jnp.where(rate > 0, rate, 1), 0)  # a schedule may reach 0

        def moved(m: jax.Array, x: jax.Array, new: jax.Array) -> jax.Array:
            return times(momentum, m) + per_rate.astype(x.dtype) * (x - new)

        return after, jax.tree.map(moved, state, params, after)

    network = over_topology(clique_averaging=clique_averaging, weights=weights)
    return Algorithm(network, _zeros, step, Traits(requires="rows", sends=sends()))


def _zeros(params: Params, network: Network) -> State:
    del network
    return jax.tree.map(jnp.zeros_like, params)


def _rate(learning_rate: Rate, round: Round) -> Any:
    return learning_rate(round.number) if callable(learning_rate) else learning_rate


def _check(learning_rate: Any, momentum: Any) -> None:
    for name, value, most in (("learning_rate", learning_rate, jnp.inf), ("momentum", momentum, 1)):
        is_schedule = name == "learning_rate" and callable(value)
        if not is_schedule and not isinstance(value, jax.core.Tracer):
            _checks.real(name, value, 0, most)
