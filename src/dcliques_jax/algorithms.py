"""Algorithms: what happens in one round, for all nodes.

An `Algorithm` holds pure functions that build the network, initialise the state and compute one round, and the traits
that describe it. It works on stacked pytrees of parameters and gradients, independent of data and models:

    g = G_t grad F(theta; S)      G_t: identity, clique average or the average over any neighbourhood
    u = optimizer(g)              any optax transformation, per node
    theta = W_t (theta + u)       W_t: Metropolis-Hastings or any other doubly stochastic matrix

To write your own, start from the source of `dsgd`; "Your own algorithm" in the how-to goes through it step by step.
"""

import math
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
    """The current round, as an algorithm sees it."""

    number: jax.Array  # [] number of rounds before this one
    key: jax.Array  # random key of this run and round; to draw per node use `node_keys`
    nodes: jax.Array  # [slots] the node that each slot stores, -1 in an empty slot
    gradient: Callable[[Params], Params]  # gradients on this round's batches at any stacked parameters

    def node_keys(self) -> jax.Array:
        """Returns one key per node, `[slots]`. It depends on the run, the round and the node, but not on the slot."""
        return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(self.key, self.nodes)


class Network(NamedTuple):
    """The matrices over which nodes communicate, constant during a run. `at` returns the matrices of one round."""

    gossip: mixing.Weights  # matrix W, which mixes models
    gradients: mixing.Weights  # matrix G, which averages gradients

    def at(self, round: Round) -> "Network":
        """Returns the network of one round."""
        return Network(*(weights.at(round) for weights in self))


class Traffic(NamedTuple):
    """Communication per node in each round, in turn if matrices change from round to round."""

    messages: np.ndarray  # [turns, nodes] number of messages that each node sends
    bytes: np.ndarray  # [turns, nodes] their size


def models_and_gradients(network: Network, model_bytes: int) -> Traffic:
    """Returns the traffic of nodes that send a model over every edge of W and a gradient over every edge of G."""
    found = [mixing.messages_sent(weights) for weights in network]
    turns = math.lcm(*map(len, found))
    messages = sum(np.tile(each, (turns // len(each), 1)) for each in found)
    return Traffic(np.asarray(messages), model_bytes * np.asarray(messages))


class Traits(NamedTuple):
    """What an algorithm requires of the network, checked before compilation, and how much it sends."""

    requires: str = "symmetric"  # of W: "rows" sum to 1, "columns" too, or it is "symmetric" as well
    stands: frozenset[str] = frozenset({"links", "nodes"})  # what may fail, see `faults`
    sends: Callable[[Network, int], Traffic] | None = None  # (network, bytes of a model) -> traffic; None: unknown


class Algorithm(NamedTuple):
    """A decentralised learning algorithm, as pure functions.

    Nodes are stored in slots, in an order that makes rounds fast. On a mesh each device holds some of the slots, and
    slots may be empty. Therefore `step` must exchange values between nodes with `mixing.mix` only, identify nodes by
    `round.nodes`, and draw random numbers with `round.node_keys()`. Results are in the order of the topology.

    Every leaf of the state has the nodes on its first axis, or is a scalar that all nodes share.
    """

    network: Callable[[Topology], Network]  # topology -> network; called once, on the host
    init: Callable[[Params, Network], State]  # (stacked params, network) -> initial state
    step: Callable[..., tuple[Params, State]]  # (params, gradients, state, network, round) -> (params, state)
    traits: Traits = Traits()  # requirements and traffic


def over_topology(
    *, clique_averaging: bool | None = None, weights: Any = None, gradient_weights: Any = None
) -> Callable[[Topology], Network]:
    """Returns a function that builds the network of a topology, for `Algorithm.network`.

    Args:
      clique_averaging: whether to average gradients over the topology's gradient edges, that is over cliques (or over
        the diverse neighbours of `topologies.diverse_random`). Default: only if the topology has cliques.
      weights: gossip matrix W, as `mixing.Weights` or any matrix over the topology's edges. Default:
        `topology.weights()`, which are Metropolis-Hastings weights for an undirected graph.
      gradient_weights: matrix G that averages gradients, as `mixing.Weights` or any matrix whose rows sum to 1. Pass
        either `gradient_weights` or `clique_averaging`, not both.

    >>> from dcliques_jax import topologies
    >>> over_topology()(topologies.ring(3)).gradients
    Identity(num_nodes=3)
    """
    if gradient_weights is not None and clique_averaging is not None:
        raise ValueError(f"clique_averaging={clique_averaging} and gradient_weights: pass either, not both")
    if clique_averaging not in (None, True, False):
        raise ValueError(f"clique_averaging={clique_averaging!r} must be True, False or None")

    def network(topology: Topology) -> Network:
        gossip = mixing.of_topology(topology) if weights is None else _as_weights(weights)
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
    """Decentralised SGD (Algorithm 1), with Clique Averaging (Algorithm 3) if the topology has cliques.

    `optax.sgd(lr, momentum=m)` gives the paper's momentum: v <- m v + g, theta <- theta - lr v. Each node keeps its own
    momentum.

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

    of_topology = over_topology(clique_averaging=clique_averaging, weights=weights, gradient_weights=gradient_weights)

    def network(topology: Topology) -> Network:
        found = of_topology(topology)
        if weights is not None:  # only a topology, such as Epidemic Learning, may let the mean drift
            mixing.check_gossip(found.gossip, topology, "columns")
        return found

    return Algorithm(network, init, step, Traits(requires="rows", sends=models_and_gradients))


def _as_weights(matrix: Any) -> mixing.Weights:
    return matrix if isinstance(matrix, mixing.Weights) else mixing.from_matrix(matrix)
