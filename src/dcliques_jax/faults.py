"""What may go wrong in a round: messages get lost, nodes come and go.

`simulate(faults=...)` takes one fault or a list, and they compose. A fault is a random process beside the algorithm. It
says in every round which nodes take part and which links work:

    theta_i <- theta_i + sum_j a_ij W_ij (theta_j - theta_i)      a_ij = 1 if the message from j reaches i, else 0

- Gossip leaves the weight of a lost message with the receiver's own model. If W is symmetric and links fail in both
  directions, W_t stays symmetric and doubly stochastic, and the mean of all models stays exact. Otherwise rows sum to 1
  and columns do not: algorithms that need columns refuse such a fault.
- Clique Averaging, and every other average of gradients, averages what arrives and the node's own gradient.
- One coin per link and round decides for models and gradients alike. Coins depend on the seed, the round, the place of
  the fault in the list and the two nodes. Devices and the order of storage do not change them.
- An offline node neither sends nor receives. It keeps its model and every part of its state, and skips its batch.

A fault of rate 0 is no fault: the run compiles the same program and gives the same bits as without it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from dcliques_jax import _checks
from dcliques_jax._random import random_bits

State = Any
Ids = tuple[jax.Array, jax.Array]
"""The numbers that identify what may fail: node and 0, smaller and larger node of a link, or receiver and sender."""

_START = 2**32 - 1  # folded into the key of a fault for its first state


class Fault(NamedTuple):
    """A process that says in every round what takes part.

    `init` and `draw` are pure functions of arrays that may have any shape. Random numbers must depend on the key and
    the ids only, as those of `coins` do, so that both ends of a link and all devices agree.
    """

    name: str  # with its arguments
    fails: str  # "nodes", "links" (in both directions at once) or "messages" (in each direction alone)
    rate: float  # expected share of failures; 0: the fault is dropped
    draw: Callable[..., tuple[State, jax.Array]]  # (state, number, key, ids) -> (state, alive); `number`: rounds so far
    init: Callable[[jax.Array, Ids], State] = lambda key, ids: ()  # state before the first round
    works: Callable[[int, int], float] | None = None  # (n, k) -> P(k of n nodes all work); None: independent
    num_nodes: int | None = None  # number of nodes that it is made for; None: any

    def __repr__(self) -> str:
        return f"Fault({self.name})"


def message_loss(p: float, directed: bool = False) -> Fault:
    """Loses each exchange between two nodes with probability p, independently of all others.

    By default a failed handshake loses the messages in both directions: E[W_t] = (1 - p) W + p I, and W_t is symmetric
    and doubly stochastic if W is symmetric.

    Args:
      p: probability of a loss.
      directed: whether each message is lost alone. Then columns of W_t do not sum to 1 and the mean of all models
        drifts. D-SGD tolerates this.

    >>> message_loss(0.1)
    Fault(message_loss(0.1))
    """
    p = _checks.share("p", p)
    if not isinstance(directed, bool):
        raise ValueError(f"directed={directed!r} must be True or False")

    def draw(state: State, number: jax.Array, key: jax.Array, ids: Ids) -> tuple[State, jax.Array]:
        del number
        return state, coins(key, ids, 1 - p)

    name = f"message_loss({p:g}{', directed=True' * directed})"
    return Fault(name, "messages" if directed else "links", p, draw)


def bursts(p: float, length: float) -> Fault:
    """Loses messages in bursts: every link is good or bad, and a bad link loses everything (Gilbert-Elliott).

    A bad link becomes good with probability r = 1 / length, a good one bad with probability a = p r / (1 - p). So a
    share p of all exchanges is lost, in bursts of `length` rounds on average, and the correlation from one round to the
    next is 1 - a - r. The first states are drawn from the stationary law.

    Args:
      p: share of exchanges that are lost, below 1.
      length: mean length of a burst in rounds, at least 1.

    >>> bursts(0.1, 5)
    Fault(bursts(0.1, 5))
    """
    p, length = _checks.share("p", p), _checks.real("length", length, 1)
    if p == 1 or p > (1 - p) * length:
        raise ValueError(
            f"bursts({p:g}, {length:g}): good links would last less than a round; lower p, or raise length"
        )
    recover = 1 / length
    break_down = p * recover / (1 - p)

    def init(key: jax.Array, ids: Ids) -> State:
        return coins(key, ids, 1 - p)

    def draw(good: State, number: jax.Array, key: jax.Array, ids: Ids) -> tuple[State, jax.Array]:
        del number
        good = _markov(good, key, ids, stay=1 - break_down, come_back=recover)
        return good, good

    return Fault(f"bursts({p:g}, {length:g})", "links", p, draw, init)


def churn(leave: float, join: float) -> Fault:
    """Lets nodes leave and come back: in every round, online nodes leave and offline nodes join at random.

    A share join / (leave + join) of the nodes is online, also in the first round.

    Args:
      leave: probability that an online node goes offline.
      join: probability that an offline node comes back, above 0.

    >>> churn(0.05, 0.2)
    Fault(churn(0.05, 0.2))
    """
    leave, join = _checks.share("leave", leave), _checks.share("join", join)
    if join == 0:
        raise ValueError("join=0: nodes that leave would never come back; pass a probability above 0")
    online = join / (leave + join)

    def init(key: jax.Array, ids: Ids) -> State:
        return coins(key, ids, online)

    def draw(state: State, number: jax.Array, key: jax.Array, ids: Ids) -> tuple[State, jax.Array]:
        del number
        state = _markov(state, key, ids, stay=1 - leave, come_back=join)
        return state, state

    return Fault(f"churn({leave:g}, {join:g})", "nodes", 1 - online, draw, init)


def participation(fraction: float) -> Fault:
    """Lets exactly that share of the nodes take part in each round, rounded to whole nodes and at least one.

    Args:
      fraction: share of nodes, above 0.

    >>> participation(0.5)
    Fault(participation(0.5))
    """
    fraction = _checks.share("fraction", fraction)
    if fraction == 0:
        raise ValueError("fraction=0: no node would ever take part; pass a share above 0")

    def taking_part(nodes: int) -> int:
        return max(1, round(fraction * nodes))

    def draw(state: State, number: jax.Array, key: jax.Array, ids: Ids) -> tuple[State, jax.Array]:
        del number
        order = jnp.argsort(random_bits(key, *ids))
        count = taking_part(len(order))
        return state, jnp.zeros(len(order), bool).at[order[:count]].set(True)

    def works(nodes: int, k: int) -> float:
        return math.comb(taking_part(nodes), k) / max(1, math.comb(nodes, k))

    return Fault(f"participation({fraction:g})", "nodes", 1 - fraction, draw, works=works)


def stragglers(p: float) -> Fault:
    """Lets each node sit a round out with probability p: it is offline for this round.

    Args:
      p: probability that a node sits a round out.

    >>> stragglers(0.2)
    Fault(stragglers(0.2))
    """
    p = _checks.share("p", p)

    def draw(state: State, number: jax.Array, key: jax.Array, ids: Ids) -> tuple[State, jax.Array]:
        del number
        return state, coins(key, ids, 1 - p)

    return Fault(f"stragglers({p:g})", "nodes", p, draw)


def trace(online: npt.ArrayLike) -> Fault:
    """Takes from a recording which nodes are online in each round. It repeats when it has ended.

    Args:
      online: booleans `[rounds, nodes]`.

    >>> trace(np.array([[True, False], [True, True]]))
    Fault(trace(2 rounds, 2 nodes))
    """
    try:
        recorded = np.array(online)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"online must be booleans [rounds, nodes]: {error}") from error
    if recorded.dtype != np.bool_ or recorded.ndim != 2 or recorded.size == 0:
        raise ValueError(f"online must be booleans [rounds, nodes], not {recorded.dtype} of shape {recorded.shape}")
    rounds, nodes = recorded.shape

    def draw(state: State, number: jax.Array, key: jax.Array, ids: Ids) -> tuple[State, jax.Array]:
        del key, ids
        return state, jnp.asarray(recorded)[number % rounds]

    def works(nodes: int, k: int) -> float:
        return float(np.mean([math.comb(int(count), k) for count in recorded.sum(axis=1)])) / max(
            1, math.comb(nodes, k)
        )

    name = f"trace({rounds} rounds, {nodes} nodes)"
    return Fault(name, "nodes", 1 - float(recorded.mean()), draw, works=works, num_nodes=nodes)


def coins(key: jax.Array, ids: Ids, probability: float) -> jax.Array:
    """Throws one coin per id: True with the given probability. The coin depends on the key and the id only.

    Args:
      key: a threefry key, such as the one that `Fault.draw` gets.
      ids: two arrays of one shape that together number what the coins are for.
      probability: probability of True, to a precision of 2^-32.

    >>> ids = (jnp.arange(4), jnp.zeros(4, int))
    >>> coins(jax.random.key(0), ids, 0.5).shape
    (4,)
    """
    return random_bits(key, *ids) < _threshold(probability)


def _markov(state: jax.Array, key: jax.Array, ids: Ids, *, stay: float, come_back: float) -> jax.Array:
    """Draws the next states of chains that work or do not work, with one coin each."""
    return random_bits(key, *ids) < jnp.where(state, _threshold(stay), _threshold(come_back))


def _threshold(probability: float) -> np.uint32:
    """Returns the number that random bits are below with a probability, to a precision of 2^-32."""
    return np.uint32(min(round(probability * 2**32), 2**32 - 1))


def first_key(key: jax.Array) -> jax.Array:
    """Returns the key for the first state of a fault; no round, which is folded in for draws, has its number."""
    return jax.random.fold_in(key, _START)


def as_faults(faults: Fault | Sequence[Fault] | None, num_nodes: int) -> tuple[Fault, ...]:
    """Returns the faults that can happen, from what `simulate(faults=...)` takes. Those of rate 0 are left out."""
    given = [] if faults is None else [faults] if isinstance(faults, Fault) else faults
    if not isinstance(given, (list, tuple)) or not all(isinstance(fault, Fault) for fault in given):
        raise ValueError(f"faults={faults!r} must be a fault or a list of faults, such as faults.message_loss(0.1)")
    for fault in given:
        _checks.choice("fails", fault.fails, ("nodes", "links", "messages"))
        _checks.share("rate", fault.rate)
        if fault.num_nodes not in (None, num_nodes):
            raise ValueError(f"{fault.name} does not fit a topology of {num_nodes} nodes")
    return tuple(fault for fault in given if fault.rate > 0)
