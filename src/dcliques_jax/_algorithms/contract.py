"""The parts of an algorithm and of the network it runs on."""

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
    """Communication in each round, in turn if matrices change from round to round."""

    messages: np.ndarray  # [turns, nodes] number of messages that each node sends
    bytes: np.ndarray  # [turns, nodes] their size
    received: np.ndarray | None = None  # [turns, nodes] size of the messages to each node; None: as `bytes`
    phases: np.ndarray | None = None  # [turns] number of times that nodes wait for messages; None: once


def sends(gossip_bytes: Callable[[Params], int] | None = None) -> Callable[[Network, Params], Traffic]:
    """Returns a function for `Traits.sends`: a message over every edge of W and a gradient over every edge of G.

    Args:
      gossip_bytes: size of a message over an edge of W for the parameters of one node. Default: that of a model.
    """

    def traffic(network: Network, params: Params) -> Traffic:
        sizes = ((gossip_bytes or model_bytes)(params), model_bytes(params))
        found = [mixing.messages(weights) for weights in network]
        turns = math.lcm(*(len(each.sent) for each in found))
        sent, received, phases = (
            [np.tile(part, (turns // len(part), *[1] * (part.ndim - 1))) for part in parts]
            for parts in zip(*found, strict=True)
        )
        return Traffic(
            sent[0] + sent[1],
            sizes[0] * sent[0] + sizes[1] * sent[1],
            sizes[0] * received[0] + sizes[1] * received[1],
            phases[0] + phases[1],
        )

    return traffic


def with_state(sent: Traffic, network: Network, state: Any) -> Traffic:
    """Adds the state of models to the messages over the edges of W, without more messages."""
    edges = mixing.messages(network.gossip)
    size, turns = model_bytes(state), math.lcm(len(sent.bytes), len(edges.sent))

    def longer(part: np.ndarray) -> np.ndarray:
        return np.tile(part, (turns // len(part), *[1] * (part.ndim - 1)))

    received = sent.bytes if sent.received is None else sent.received
    return Traffic(
        longer(sent.messages),
        longer(sent.bytes) + size * longer(edges.sent),
        longer(received) + size * longer(edges.received),
        None if sent.phases is None else longer(sent.phases),
    )


def model_bytes(params: Params) -> int:
    """Returns the size of the parameters of one node."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))


def num_parameters(params: Params) -> int:
    """Returns the number of parameters of one node."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


class Traits(NamedTuple):
    """What an algorithm requires of the network, checked before compilation, and how much it sends."""

    requires: str = "symmetric"  # of W, see `mixing.check_gossip`
    stands: frozenset[str] = frozenset({"links", "nodes"})  # what may fail, see `faults`
    sends: Callable[[Network, Params], Traffic] | None = None  # (network, shapes of a node's model); None: unknown
    check: Callable[[Network], None] | None = None  # raises a `ValueError` if something else of the network is wrong


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


def check_optimizer(optimizer: Any) -> None:
    """Raises a `ValueError` unless the value is an optax transformation."""
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise ValueError(f"optimizer={optimizer!r} is not an optax transformation: pass for example optax.sgd(0.1)")


def updated(
    optimizer: optax.GradientTransformation, params: Params, gradients: Params, state: State
) -> tuple[Params, State]:
    """Takes one step of the optimiser at every node, without communication."""
    updates, state = jax.vmap(optimizer.update)(gradients, state, params)
    return optax.apply_updates(params, updates), state


def times(factor: Any, leaf: jax.Array) -> jax.Array:
    """Multiplies in the type of the leaf: schedules and values of a sweep are float32, and bfloat16 must stay so."""
    return (factor.astype(leaf.dtype) if hasattr(factor, "dtype") else factor) * leaf


def _as_weights(matrix: Any) -> mixing.Weights:
    return matrix if isinstance(matrix, mixing.Weights) else mixing.from_matrix(matrix)
