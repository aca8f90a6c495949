"""One round for all nodes.

An algorithm is a pair of pure functions on stacked pytrees. It sees gradients, never data or models:

    g = G grad F(theta; S)        G: identity, clique average or the average over any neighbourhood
    u = optimizer(g)              any optax transformation, for each node by itself
    theta = W (theta + u)         W: Metropolis-Hastings or any other doubly stochastic matrix
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from dcliques_jax import mixing
from dcliques_jax.topologies import Topology

Params = Any
State = Any


class Algorithm(NamedTuple):
    """`init` prepares the state on the host; `step` is one round, traced into the compiled program.

    Rounds are faster when the nodes of a clique lie side by side in memory. An algorithm that says how to `reorder` its
    state lets `simulate` store nodes so, and share them out over the devices of a mesh; what comes back is in the
    topology's order all the same. Where `order[k]` is -1 the place stays empty: whatever an array has there will do.
    On a mesh `step` sees the places of one device only: all that crosses nodes must go through `Weights`, which stay as
    they are, and arrays of the state with the places on their first axis are taken for values of nodes.
    """

    init: Callable[[Topology, Params], State]  # (topology, stacked params) -> state
    step: Callable[[Params, Params, State], tuple[Params, State]]  # (params, gradients, state) -> both, after the round
    reorder: Callable[[State, np.ndarray], State] | None = None  # (state, order) -> state, node `order[k]` at place k


class DSGDState(NamedTuple):
    """What the next round of `dsgd` needs besides the parameters."""

    optimizer: Any  # the optimiser's state, stacked over nodes; momentum is never gossiped
    gradient_weights: mixing.Weights  # G
    weights: mixing.Weights  # W


def dsgd(
    optimizer: optax.GradientTransformation = optax.sgd(0.1),
    *,
    clique_averaging: bool | None = None,
    weights: Any = None,
    gradient_weights: Any = None,
) -> Algorithm:
    """Decentralised SGD (Algorithm 1), with Clique Averaging (Algorithm 3) where the topology has cliques.

    With `optax.sgd(lr, momentum=m)` it is the paper's momentum: v <- m v + g, theta <- theta - lr v.

    Args:
      optimizer: any optax transformation; every node runs its own. One that draws random numbers draws the same at
        every node, since all start from the same state.
      clique_averaging: whether gradients are averaged over the topology's gradient edges, that is over cliques (or over
        the diverse neighbours of `topologies.diverse_random`). By default: where the topology has cliques.
      weights: gossip matrix W, as `mixing.Weights` or any symmetric, doubly stochastic matrix over the topology's
        edges. Metropolis-Hastings by default.
      gradient_weights: matrix G that averages gradients, as `mixing.Weights` or any matrix whose rows sum to 1, in the
        place of `clique_averaging`.
    """
    if gradient_weights is not None and clique_averaging is not None:
        raise ValueError(f"clique_averaging={clique_averaging} and gradient_weights exclude each other: give one")
    if clique_averaging not in (None, True, False):
        raise ValueError(f"clique_averaging={clique_averaging!r} must be True, False or None")
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise ValueError(f"optimizer={optimizer!r} is no optax transformation: pass for example optax.sgd(0.1)")

    def init(topology: Topology, params: Params) -> DSGDState:
        if weights is None:
            gossip = mixing.metropolis_hastings(topology)
        else:
            gossip = _as_weights(weights)
            mixing.check_gossip(gossip, topology)
        if gradient_weights is not None:
            averaging = _as_weights(gradient_weights)
            mixing.check_rows(averaging.to_sparse())
        elif clique_averaging or (clique_averaging is None and topology.clique_ids is not None):
            averaging = mixing.clique_average(topology)
        else:
            averaging = mixing.Identity(topology.num_nodes)
        if averaging.num_nodes != topology.num_nodes:
            raise ValueError(
                f"gradient_weights are for {averaging.num_nodes} nodes, the topology has {topology.num_nodes}"
            )
        return DSGDState(jax.vmap(optimizer.init)(params), averaging, gossip)

    def step(params: Params, gradients: Params, state: DSGDState) -> tuple[Params, DSGDState]:
        gradients = mixing.mix(state.gradient_weights, gradients)
        updates, optimizer_state = jax.vmap(optimizer.update)(gradients, state.optimizer, params)
        params = mixing.mix(state.weights, optax.apply_updates(params, updates))
        return params, state._replace(optimizer=optimizer_state)

    def reorder(state: DSGDState, order: np.ndarray) -> DSGDState:
        optimizer_state = jax.tree.map(lambda leaf: leaf[order], state.optimizer)
        return DSGDState(optimizer_state, state.gradient_weights.reordered(order), state.weights.reordered(order))

    return Algorithm(init, step, reorder)


def _as_weights(matrix: Any) -> mixing.Weights:
    return matrix if isinstance(matrix, mixing.Weights) else mixing.from_matrix(matrix)
