"""Stochastic gradient push, for graphs with directions."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from dcliques_jax import mixing
from dcliques_jax._algorithms.contract import (
    Algorithm,
    Network,
    Params,
    Round,
    State,
    Traits,
    check_optimizer,
    model_bytes,
    over_topology,
    sends,
)
from dcliques_jax.topologies import Topology

_WEIGHT_BYTES = 4  # of the push-sum weight in a message


def push_sum(
    optimizer: optax.GradientTransformation = optax.sgd(0.1), *, clique_averaging: bool | None = False
) -> Algorithm:
    """Stochastic gradient push (SGP; Assran et al., ICML 2019): unbiased on any strongly connected digraph.

        X = w Z + u,   X <- P X,   w <- P w,   Z <- X / w      u = optimizer(G(Z)), w = 1 at first

    The models are Z. Nodes split what they have: P_ij = 1 / (1 + outdegree(j)), or the matrices of the topology if
    their columns sum to 1. The weights w sum to the number of nodes, and stay 1 if rows of P sum to 1 too: then SGP is
    `dsgd`. A message holds a model and a weight.

    Args:
      optimizer: any optax transformation.
      clique_averaging: whether to average gradients over cliques, see `over_topology`.

    >>> import networkx as nx
    >>> from dcliques_jax import datasets, partitions, simulate, topologies
    >>> data = partitions.shards(datasets.synthetic(), 10)
    >>> arcs = [(j, (j + step) % 10) for j in range(10) for step in (1, 3) if step == 1 or j % 2 == 0]
    >>> digraph = topologies.from_networkx(nx.DiGraph(arcs))
    >>> simulate(digraph, data, algorithm=push_sum(), epochs=1, progress=False).history.round
    array([0, 4])
    """
    check_optimizer(optimizer)

    def init(params: Params, network: Network) -> State:
        del network
        first = jax.tree.leaves(params)[0]
        return jax.vmap(optimizer.init)(params), jnp.ones(len(first), first.dtype)

    def step(params: Params, gradients: Params, state: State, network: Network, round: Round) -> tuple[Params, State]:
        del round
        gradients = mixing.mix(network.gradients, gradients)
        of_optimizer, weight = state
        updates, of_optimizer = jax.vmap(optimizer.update)(gradients, of_optimizer, params)
        pushed = jax.tree.map(lambda z, u: _per_node(weight, z) * z + u, params, updates)
        pushed, weight = mixing.mix(network.gossip, (pushed, weight))
        return jax.tree.map(lambda x: x / _per_node(weight, x), pushed), (of_optimizer, weight)

    def network(topology: Topology) -> Network:
        gradients = over_topology(clique_averaging=clique_averaging, weights=mixing.Identity(topology.num_nodes))
        return Network(mixing.push(topology), gradients(topology).gradients)

    # A node would have to know which of its messages were lost, to keep what they held.
    traits = Traits("mass", frozenset(), sends(lambda params: model_bytes(params) + _WEIGHT_BYTES))
    return Algorithm(network, init, step, traits)


def _per_node(weight: Any, x: jax.Array) -> jax.Array:
    return weight.astype(x.dtype).reshape(-1, *[1] * (x.ndim - 1))
