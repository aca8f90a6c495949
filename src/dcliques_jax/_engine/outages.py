"""Faults in a run: whether they can be honoured, their state, and what they leave of a round."""

import functools
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dcliques_jax import mixing
from dcliques_jax._mixing.forms import MOST_UNROLLED, Lists
from dcliques_jax._mixing.paced import base_of, over_bases
from dcliques_jax._mixing.sequences import as_unions, to_common_form
from dcliques_jax.algorithms import Network, Round, Traits
from dcliques_jax.faults import Fault, Ids, first_key
from dcliques_jax.topologies import Topology

_FAULTS = 2**32 - 2  # folded into the key of a run for faults; `program` folds in epochs and another such number
_MOST_PAIRS = 2000  # nodes of the largest dense matrix whose links may fail: every round draws a coin for each pair


class Faults(NamedTuple):
    """The faults of a run and the number of its nodes."""

    processes: tuple[Fault, ...]
    num_nodes: int


class FaultState(NamedTuple):
    """The states of all faults, in their order."""

    nodes: Any  # per fault of nodes, arrays `[nodes]` by their numbers; the same on all devices
    links: Any  # per matrix of the network and fault of links, arrays `[slots, width]` as its lists
    ends: Any  # [] checksum of the nodes that links join; states of other links mean nothing


class Taken(NamedTuple):
    """What takes part in a round."""

    network: Network
    state: FaultState | None
    online: jax.Array | None  # [slots] which nodes take part; None: all
    counted: tuple[jax.Array, ...]  # of messages to each slot, and whether it takes part; see `Tally`

    def frozen(self, after: Any, before: Any) -> Any:
        """Restores the rows of offline nodes in a pytree after a step. Scalars, which all nodes share, advance."""
        if self.online is None:
            return after
        online = self.online

        def row(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(online.reshape(-1, *[1] * (new.ndim - 1)), new, old) if new.ndim else new

        return jax.tree.map(row, after, before)


# Before anything is compiled


def check(faults: tuple[Fault, ...], topology: Topology, network: Network, traits: Traits) -> None:
    """Raises a `ValueError` if a fault cannot be honoured on a network, or an algorithm is not right under it."""
    for fault in faults:
        kind = "nodes" if fault.fails == "nodes" else "links"
        if kind not in traits.stands:
            averages = not isinstance(base_of(network.gradients), mixing.Identity)
            remedy = "omit the fault" + ", or try it with clique_averaging=False" * averages
            raise ValueError(f"this algorithm is not right if {kind} fail, as in {fault.name}: {remedy}")
        if fault.fails != "nodes" and _has_memory(fault) and isinstance(base_of(network.gossip), mixing.Drawn):
            raise ValueError(f"{fault.name} needs links that last, but {topology.name} draws them in every round")
        if traits.requires != "rows" and (fault.fails == "messages" or mixing.meets(network.gossip) != "symmetric"):
            why = "loses messages one way" if fault.fails == "messages" else "meets an asymmetric gossip matrix"
            raise ValueError(
                f"{fault.name} {why}: columns of W no longer sum to 1, but this algorithm requires "
                f"{traits.requires!r}; use losses in both directions on an undirected graph, or algorithms.dsgd"
            )


def with_links(networks: list[Network], faults: tuple[Fault, ...]) -> list[Network]:
    """Converts networks to forms whose links can fail, the same form and shape for all runs."""
    links = [fault for fault in faults if fault.fails != "nodes"]
    if not links:
        return networks

    def converted(weights: Any) -> Any:
        common: Any = to_common_form([_as_lists(each, links[0]) for each in weights])
        if isinstance(common[0], mixing.Sequence) and any(map(_has_memory, links)):
            return as_unions(common)
        return common

    both = [over_bases(converted, weights) for weights in zip(*networks, strict=True)]
    return [Network(*parts) for parts in zip(*both, strict=True)]


def _as_lists(weights: mixing.Weights, fault: Fault) -> mixing.Weights:
    """Converts means over groups to a form with links. Other forms have links, or say that they have not."""
    if type(weights) is mixing.GroupMean and np.shape(weights.members)[1] <= MOST_UNROLLED + 1:
        return mixing.Neighbours.from_sparse(weights.to_sparse())
    wide = type(weights) is mixing.GroupMean or isinstance(_static(weights), mixing.Dense)
    if wide and weights.num_nodes > _MOST_PAIRS:
        raise ValueError(
            f"{fault.name} would draw the fate of every pair of {weights.num_nodes:,} nodes, since a node has more "
            f"than {MOST_UNROLLED} links: use at most {_MOST_PAIRS:,} nodes, a sparser topology, or faults of nodes"
        )
    return mixing.Dense.from_sparse(weights.to_sparse()) if type(weights) is mixing.GroupMean else weights


def _has_memory(fault: Fault) -> bool:
    shape = jax.ShapeDtypeStruct((1,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0, impl="threefry2x32"))
    return bool(jax.tree.leaves(jax.eval_shape(fault.init, key, (shape, shape))))


def start(faults: Faults, network: Network, key: jax.Array) -> FaultState:
    """Returns the states before the first round, by node. `key` is that of the run."""
    everyone = jnp.arange(faults.num_nodes, dtype=jnp.int32)
    nodes = tuple(
        fault.init(first_key(_key(key, index)), _of_nodes(everyone)) for index, fault in _of(faults, nodes=True)
    )
    senders = [_static(weights).senders(everyone) for weights in network]
    links = tuple(_start_links(faults, each, everyone, key) for each in senders)
    ends = zlib.crc32(b"".join(np.asarray(each).tobytes() for each in senders)) if jax.tree.leaves(links) else 0
    return FaultState(nodes, links, jnp.uint32(ends))


def _start_links(faults: Faults, senders: jax.Array, everyone: jax.Array, key: jax.Array) -> tuple[Any, ...]:
    return tuple(
        fault.init(first_key(_key(key, index)), _of_links(fault, everyone, senders)) if _has_memory(fault) else ()
        for index, fault in _of_entries(faults, senders)
    )


def have_pairs(network: Network) -> tuple[bool, ...]:
    """Returns for each matrix whether its links are pairs of nodes, as in dense matrices, and not entries of lists."""

    def form(weights: Any) -> Any:
        weights = base_of(weights)
        weights = weights.pool if isinstance(weights, mixing.Drawn) else weights
        return weights.form if isinstance(weights, mixing.Sequence) else weights

    return tuple(not isinstance(form(weights), Lists) for weights in network)


def _static(weights: Any) -> mixing.Weights:
    """Returns the matrix of one round. The lists of a sequence keep their places, see `with_links`."""
    if isinstance(weights, mixing.Paced):
        return weights.together([_static(weights.base)] * weights.times, True)
    weights = weights.pool if isinstance(weights, mixing.Drawn) else weights
    return weights.turns()[0] if isinstance(weights, mixing.Sequence) else weights


# In every round


def take(faults: Faults | None, state: Any, network: Network, round: Round, key: jax.Array) -> Taken:
    """Draws what takes part in a round. Without faults, everything does. `key` is that of the run."""
    network = network.at(round)
    if faults is None:
        return Taken(network, None, None, ())
    online, node_states = _draw_nodes(faults, state.nodes, round, key)
    here = online[round.nodes] & (round.nodes >= 0)
    entries = [
        _draw_entries(faults, before, weights, round, key, online, here)
        for weights, before in zip(network, state.links, strict=True)
    ]
    counts = (*(entry.sent for entry in entries), *(entry.lost for entry in entries), here.astype(jnp.int32))
    counted = tuple(jnp.where(round.nodes >= 0, values, 0) for values in counts)
    return Taken(
        Network(network.gossip.masked(entries[0].alive), network.gradients.renormalised(entries[1].alive)),
        FaultState(node_states, tuple(entry.state for entry in entries), state.ends),
        here if _of(faults, nodes=True) else None,
        counted,
    )


def _draw_nodes(faults: Faults, states: Any, round: Round, key: jax.Array) -> tuple[jax.Array, tuple[Any, ...]]:
    """Draws which nodes are online, `[nodes]`; returns the states of faults, too."""
    everyone = jnp.arange(faults.num_nodes, dtype=jnp.int32)
    drawn = [
        fault.draw(before, round.number, _key(key, index, round.number), _of_nodes(everyone))
        for (index, fault), before in zip(_of(faults, nodes=True), states, strict=True)
    ]
    return _all([alive for _, alive in drawn], everyone.shape), tuple(after for after, _ in drawn)


class _Entries(NamedTuple):
    """What becomes of the entries of a matrix in a round."""

    alive: jax.Array  # [slots, width] which are read; [slots] for means over groups
    state: Any  # of the faults of links
    sent: jax.Array  # [slots] number of messages from online nodes to each
    lost: jax.Array  # [slots] number of those that do not arrive


def _draw_entries(
    faults: Faults,
    states: Any,
    weights: mixing.Weights,
    round: Round,
    key: jax.Array,
    online: jax.Array,
    here: jax.Array,
) -> _Entries:
    senders = weights.senders(round.nodes)
    drawn = [
        fault.draw(before, round.number, _key(key, index, round.number), _of_links(fault, round.nodes, senders))
        for (index, fault), before in zip(_of_entries(faults, senders), states, strict=True)
    ]
    sending = online[senders]
    alive = sending & _all([working for _, working in drawn], senders.shape)
    sent = weights.count(sending)
    lost = sent - jnp.where(here, weights.count(alive), 0)
    return _Entries(alive, tuple(after for after, _ in drawn), sent, lost)


def _all(conditions: list[jax.Array], shape: tuple[int, ...]) -> jax.Array:
    return functools.reduce(jnp.logical_and, conditions, jnp.ones(shape, bool))


def _of(faults: Faults, *, nodes: bool) -> list[tuple[int, Fault]]:
    return [(index, fault) for index, fault in enumerate(faults.processes) if (fault.fails == "nodes") == nodes]


def _of_entries(faults: Faults, senders: jax.Array) -> list[tuple[int, Fault]]:
    """Returns the faults of links, none if nobody sends anything."""
    return _of(faults, nodes=False) if senders.size else []


def _of_nodes(everyone: jax.Array) -> Ids:
    return everyone, jnp.zeros_like(everyone)


def _of_links(fault: Fault, receivers: jax.Array, senders: jax.Array) -> Ids:
    receivers = jnp.broadcast_to(receivers[:, None], senders.shape)
    if fault.fails == "messages":
        return receivers, senders
    return jnp.minimum(receivers, senders), jnp.maximum(receivers, senders)


def _key(key: jax.Array, *numbers: Any) -> jax.Array:
    key = jax.random.fold_in(key, _FAULTS)
    for number in numbers:
        key = jax.random.fold_in(key, number)
    return key
