"""Algorithms: what happens in one round, for all nodes.

An `Algorithm` holds pure functions that build the network, initialise the state and compute one round, and the traits
that describe it. It works on stacked pytrees of parameters and gradients, independent of data and models:

    g = G_t grad F(theta; S)      G_t: identity, clique average or the average over any neighbourhood
    u = optimizer(g)              any optax transformation, per node
    theta = W_t (theta + u)       W_t: the gossip matrix of the topology in this round

Rivals of D-Cliques have the same form: `gradient_tracking`, `d2`, `gossip_momentum`, `quasi_global_momentum`,
`push_sum` and `choco`. Wrappers change any of them: `local_steps`, `repeated_gossip` and `sam`.

To write your own, start from the source of `dsgd`; the how-to and the notebook "Your own algorithm" show more.
"""

from dcliques_jax._algorithms.choco import choco
from dcliques_jax._algorithms.contract import (
    Algorithm,
    Network,
    Params,
    Round,
    State,
    Traffic,
    Traits,
    model_bytes,
    over_topology,
    sends,
)
from dcliques_jax._algorithms.descent import dsgd
from dcliques_jax._algorithms.exact import d2, gradient_tracking
from dcliques_jax._algorithms.momentum import gossip_momentum, quasi_global_momentum
from dcliques_jax._algorithms.push_sum import push_sum
from dcliques_jax._algorithms.wrappers import local_steps, repeated_gossip, sam

__all__ = [
    "Algorithm",
    "Network",
    "Params",
    "Round",
    "State",
    "Traffic",
    "Traits",
    "choco",
    "d2",
    "dsgd",
    "gossip_momentum",
    "gradient_tracking",
    "local_steps",
    "model_bytes",
    "over_topology",
    "push_sum",
    "quasi_global_momentum",
    "repeated_gossip",
    "sam",
    "sends",
]
