"""Decentralised SGD."""

from typing import Any

import jax
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
    over_topology,
    sends,
    updated,
)
from dcliques_jax.topologies import Topology


def dsgd(
    optimizer: optax.GradientTransformation = optax.sgd(0.1),
    *,
    clique_averaging: bool | None = None,
    weights: Any = None,
    gradient_weights: Any = None,
) -> Algorithm:
    """Decentralised SGD (Algorithm 1), with Clique Averaging (Algorithm 3) if the topology has cliques.

        X <- W (X + u),   u = optimizer(G grad F(X))

    `optax.sgd(lr, momentum=m)` gives the paper's momentum: v <- m v + g, theta <- theta - lr v. Each node keeps its own
    momentum. An optimiser that scales each node's gradient, such as Adam, has a bias if nodes have different data, even
    on a fully connected network: `gradient_tracking(optax.adam(...))` has none.

    Args:
      optimizer: any optax transformation. Each node has its own state, initialised alike: a transformation that draws
        random numbers draws the same numbers at every node.
      clique_averaging: whether to average gradients over cliques, see `over_topology`. Default: only if the topology
        has cliques.
      weights: gossip matrix W, doubly stochastic. Default: `topology.weights()`.
      gradient_weights: matrix G that averages gradients. Pass either this or `clique_averaging`, not both.

    >>> from dcliques_jax import datasets, partitions, simulate, topologies
    >>> data = partitions.shards(datasets.synthetic(), 20)
    >>> topology = topologies.d_cliques(data.label_distribution, clique_size=5)
    >>> momentum = dsgd(optax.sgd(0.05, momentum=0.9))
    >>> simulate(topology, data, algorithm=momentum, epochs=1, progress=False).history.round
    array([0, 4])
    """
    check_optimizer(optimizer)

    def init(params: Params, network: Network) -> State:
        del network
        return jax.vmap(optimizer.init)(params)

    def step(params: Params, gradients: Params, state: State, network: Network, round: Round) -> tuple[Params, State]:
        del round
        gradients = mixing.mix(network.gradients, gradients)
        params, state = updated(optimizer, params, gradients, state)
        return mixing.mix(network.gossip, params), state

    of_topology = over_topology(clique_averaging=clique_averaging, weights=weights, gradient_weights=gradient_weights)

    def network(topology: Topology) -> Network:
        found = of_topology(topology)
        if weights is not None:  # only a topology, such as Epidemic Learning, may let the mean drift
            mixing.check_gossip(found.gossip, topology, "columns")
        return found

    return Algorithm(network, init, step, Traits(requires="rows", sends=sends()))
