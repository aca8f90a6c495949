"""One round for all nodes.

An algorithm is four pure functions' worth of a method: who talks to whom, what nodes remember, one round, and what it
asks of the network. It works on stacked pytrees and sees gradients, never data or models:

    g = G_t grad F(theta; S)      G_t: identity, clique average or the average over any neighbourhood
    u = optimizer(g)              any optax transformation, for each node by itself
    theta = W_t (theta + u)       W_t: Metropolis-Hastings or any other doubly stochastic matrix

To write one of your own, start from the source of `dsgd`; "Your own algorithm" in the how-to does it step by step.
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


class Round(NamedTuple):
    """What an algorithm may know of the round it computes."""

    number: jax.Array  # [] rounds run before this one
    key: jax.Array  # of this run and this round; draw by node, with `node_keys`, never by slot
    nodes: jax.Array  # [slots] the number of the node that is stored in each slot, -1 in an empty one
    gradient: Callable[[Params], Params]  # gradients of this round's batches at other parameters

    def node_keys(self) -> jax.Array:
        """One key per node, `[slots]`: the same wherever the node is stored, different in every round and run."""
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(self.key, self.nodes)


class Network(NamedTuple):
    """What may ever be said to whom. It is constant; `Weights.at(round)` gives the matrices of one round."""

    gossip: mixing.Weights  # W, which mixes models
    gradients: mixing.Weights  # G, which averages gradients

    def at(self, round: Round) -> "Network":
        """The network of one round."""
        return Network(*(weights.at(round) for weights in self))


class Traffic(NamedTuple):
    """What each node sends in one round."""

    messages: np.ndarray  # [nodes]
    bytes: np.ndarray  # [nodes]


def models_and_gradients(network: Network, model_bytes: int) -> Traffic:
    """A model over every edge of W and, where there are others in a row of G, a gradient over every edge of G."""
    messages = sum(_readers(weights) for weights in network)
    return Traffic(np.asarray(messages), model_bytes * np.asarray(messages))


class Traits(NamedTuple):
    """What an algorithm asks of the network, checked before anything is compiled, and what it sends."""

    requires: str = "symmetric"  # of W: "rows" (sum to 1), "columns" (those too), or "symmetric" besides
    sends: Callable[[Network, int], Traffic] | None = None  # (network, bytes of a model) -> per round; None: unknown


class Algorithm(NamedTuple):
    """A method, as pure functions.

    Nodes are stored in slots, in an order that makes rounds fast; on a mesh a device holds some of them only, and some
    slots may be empty. So `step` must let nodes see each other through `mixing.mix` alone, tell nodes by `round.nodes`,
    and draw random numbers with `round.node_keys()`. Everything a user sees is in the order of the topology.

    The state has the nodes on the first axis of every leaf; scalars, the same for all nodes, are allowed.
    """

    network: Callable[[Topology], Network]  # called once, on the host
    init: Callable[[Params, Network], State]  # (stacked params, network) -> state
    step: Callable[..., tuple[Params, State]]  # (params, gradients, state, network, round) -> (params, state)
    traits: Traits = Traits()


def over_topology(
    *, clique_averaging: bool | None = None, weights: Any = None, gradient_weights: Any = None
) -> Callable[[Topology], Network]:
    """The network of most algorithms: a function of the topology, for `Algorithm.network`.

    Args:
      clique_averaging: whether gradients are averaged over the topology's gradient edges, that is over cliques (or over
        the diverse neighbours of `topologies.diverse_random`). By default: where the topology has cliques.
      weights: gossip matrix W, as `mixing.Weights` or any matrix over the topology's edges. Metropolis-Hastings by
        default.
      gradient_weights: matrix G that averages gradients, as `mixing.Weights` or any matrix whose rows sum to 1, instead
        of `clique_averaging`.

    >>> from dcliques_jax import topologies
    >>> over_topology()(topologies.ring(3)).gradients
    Identity(num_nodes=3)
    """
    if gradient_weights is not None and clique_averaging is not None:
        raise ValueError(f"clique_averaging={clique_averaging} and gradient_weights: pass either, not both")
    if clique_averaging not in (None, True, False):
        raise ValueError(f"clique_averaging={clique_averaging!r} must be True, False or None")

    def network(topology: Topology) -> Network:
        gossip = mixing.metropolis_hastings(topology) if weights is None else _as_weights(weights)
        if gradient_weights is not None:
            gradients = _as_weights(gradient_weights)
            mixing.check_rows(gradients.to_sparse())
        elif clique_averaging or (clique_averaging is None and topology.clique_ids is not None):
            gradients = mixing.clique_average(topology)
        else:
            gradients = mixing.Identity(topology.num_nodes)
        return Network(gossip, gradients)

    return network


def dsgd(
    optimizer: optax.GradientTransformation = optax.sgd(0.1),
    *,
    clique_averaging: bool | None = None,
    weights: Any = None,
    gradient_weights: Any = None,
) -> Algorithm:
    """Decentralised SGD (Algorithm 1), with Clique Averaging (Algorithm 3) where the topology has cliques.

    With `optax.sgd(lr, momentum=m)` it is the paper's momentum: v <- m v + g, theta <- theta - lr v. Momentum is never
    gossiped.

    Args:
      optimizer: any optax transformation; every node runs its own. One that draws random numbers draws the same at
        every node, since all start from the same state.
      clique_averaging: whether gradients are averaged over cliques; see `over_topology`, also for the others.
      weights: gossip matrix W, symmetric and doubly stochastic; Metropolis-Hastings by default.
      gradient_weights: matrix G that averages gradients, instead of `clique_averaging`.

    >>> from dcliques_jax import datasets, partitions, simulate, topologies
    >>> data = partitions.shards(datasets.synthetic(), 20)
    >>> topology = topologies.d_cliques(data.label_distribution, clique_size=5)
    >>> momentum = dsgd(optax.sgd(0.05, momentum=0.9))
    >>> simulate(topology, data, algorithm=momentum, epochs=1, progress=False).history.round
    array([0, 4])
    """
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise ValueError(f"optimizer={optimizer!r} is not an optax transformation: pass for example optax.sgd(0.1)")

    def init(params: Params, network: Network) -> State:
        del network
        return jax.vmap(optimizer.init)(params)

    def step(params: Params, gradients: Params, state: State, network: Network, round: Round) -> tuple[Params, State]:
        del round
        gradients = mixing.mix(network.gradients, gradients)
        updates, state = jax.vmap(optimizer.update)(gradients, state, params)
        return mixing.mix(network.gossip, optax.apply_updates(params, updates)), state

    network = over_topology(clique_averaging=clique_averaging, weights=weights, gradient_weights=gradient_weights)
    return Algorithm(network, init, step, Traits(sends=models_and_gradients))


def _as_weights(matrix: Any) -> mixing.Weights:
    return matrix if isinstance(matrix, mixing.Weights) else mixing.from_matrix(matrix)


def _readers(weights: mixing.Weights) -> np.ndarray:
    """How many others read each node's values, `[nodes]`."""
    if isinstance(weights, mixing.Identity):
        return np.zeros(weights.num_nodes, np.int64)
    if isinstance(weights, mixing.GroupMean):
        group = np.asarray(weights.group)
        return np.bincount(group)[group] - 1
    matrix = weights.to_sparse()
    return np.asarray((matrix != 0).sum(axis=0)) - (matrix.diagonal() != 0)
