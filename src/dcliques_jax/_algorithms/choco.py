"""Compressed gossip."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dcliques_jax import _checks, mixing
from dcliques_jax._algorithms.contract import (
    Algorithm,
    Network,
    Params,
    Round,
    State,
    Traits,
    check_optimizer,
    num_parameters,
    over_topology,
    sends,
    times,
    updated,
)
from dcliques_jax.compressors import Compressor


def choco(
    optimizer: optax.GradientTransformation,
    compressor: Compressor,
    step_size: float | jax.Array,
    *,
    clique_averaging: bool | None = False,
    weights: Any = None,
) -> Algorithm:
    """CHOCO-SGD (Koloskova, Stich and Jaggi, ICML 2019): nodes send compressed changes of copies of their models.

        Y = X + u,   H <- H + C(Y - H),   X <- Y + step_size (W - I) H      u = optimizer(G), H = 0 at first

    H holds the copies that neighbours have of each model. Neighbours must not miss a message, so neither faults nor
    matrices that change from round to round are allowed. The compressor C sees all parameters of a node as one vector.
    Without compression and with a step size of 1 it is `dsgd`. Tune the step size between 0.05 and 1: more compression
    needs a smaller one.

    Args:
      optimizer: any optax transformation.
      compressor: one of `compressors`.
      step_size: the step size of gossip, above 0 and at most 1.
      clique_averaging: whether to average gradients over cliques, see `over_topology`.
      weights: gossip matrix W, symmetric. Default: `topology.weights()`.

    >>> from dcliques_jax import compressors, datasets, partitions, simulate, topologies
    >>> data = partitions.shards(datasets.synthetic(), 10)
    >>> algorithm = choco(optax.sgd(0.1), compressors.top_k(0.1), 0.3)
    >>> result = simulate(topologies.ring(10), data, algorithm=algorithm, epochs=1, progress=False)
    >>> float(result.history.bytes[-1] / result.history.messages[-1])  # 8 bytes x 17 of 170 parameters
    136.0
    """
    check_optimizer(optimizer)
    if not isinstance(compressor, Compressor):
        raise ValueError(f"compressor={compressor!r} is not a compressor: pass for example compressors.top_k(0.01)")
    if not isinstance(step_size, jax.core.Tracer) and _checks.real("step_size", step_size, 0, 1) == 0:
        raise ValueError("step_size=0: models would not mix; pass a number above 0, such as 0.3")

    def init(params: Params, network: Network) -> State:
        del network
        return jax.vmap(optimizer.init)(params), jax.tree.map(jnp.zeros_like, params)

    def step(params: Params, gradients: Params, state: State, network: Network, round: Round) -> tuple[Params, State]:
        gradients = mixing.mix(network.gradients, gradients)
        of_optimizer, copies = state
        local, of_optimizer = updated(optimizer, params, gradients, of_optimizer)
        change = jax.tree.map(jnp.subtract, local, copies)
        copies = jax.tree.map(jnp.add, copies, _compressed(compressor, round.node_keys(), change))
        mixed = mixing.mix(network.gossip, copies)
        params = jax.tree.map(lambda y, new, old: y + times(step_size, new - old), local, mixed, copies)
        return params, (of_optimizer, copies)

    traits = Traits(
        "symmetric", frozenset(), sends(lambda params: compressor.bytes(num_parameters(params))), _check_pace
    )
    return Algorithm(over_topology(clique_averaging=clique_averaging, weights=weights), init, step, traits)


def _compressed(compressor: Compressor, keys: jax.Array, tree: Params) -> Params:
    """Compresses all parameters of each node as one vector."""
    leaves, structure = jax.tree.flatten(tree)
    widths = [leaf.size // len(leaf) for leaf in leaves]
    rows = jnp.concatenate([leaf.reshape(len(leaf), width) for leaf, width in zip(leaves, widths, strict=True)], axis=1)
    parts = jnp.split(jax.vmap(compressor.compress)(keys, rows), np.cumsum(widths)[:-1], axis=1)
    shaped = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, shaped)


def _check_pace(network: Network) -> None:
    if isinstance(network.gossip, mixing.Paced):
        raise ValueError(
            "choco sends one compressed change per round: it cannot skip rounds or gossip several times in one, omit "
            "local_steps and repeated_gossip"
        )
    if isinstance(network.gossip, mixing.Moving):
        raise ValueError(
            "choco needs neighbours that hear every change, but these matrices change from round to round: use a "
            "topology with one matrix"
        )
