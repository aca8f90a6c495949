"""Cliques that nodes build by messages, without anybody who knows everything."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dcliques_jax import _checks, _random
from dcliques_jax._cliques.central import check_means, exchange_skews, random_cliques, skew

_FLOAT, _NUMBER = 4, 4  # bytes of a number in a message, real or whole
_ROUNDING = 1e-12  # of skews, in units of the largest mean


class Estimation(NamedTuple):
    """How well nodes know the global label distribution after 0, 1, ... rounds, and what it has cost."""

    error: np.ndarray  # [rounds + 1] the largest distance of an estimate from the mean, sum_l | p^_i(l) - p(l) |
    messages: np.ndarray  # [rounds + 1] messages sent per node, as a mean over nodes
    bytes: np.ndarray  # [rounds + 1] their size


class Construction(NamedTuple):
    """How well cliques are built after 0, 1, ... rounds, and what it has cost."""

    skew: np.ndarray  # [rounds + 1] mean skew of cliques
    messages: np.ndarray  # [rounds + 1] messages sent per node, as a mean over nodes
    bytes: np.ndarray  # [rounds + 1] their size


def push_sum_labels(
    label_distribution: npt.ArrayLike, rounds: int, *, topology: Any = None, seed: int = 0
) -> np.ndarray:
    """Lets every node estimate the global label distribution by gossip (push-sum; Kempe et al., 2003).

        (s_i, w_i) <- (s_i, w_i) / 2 + sum over those that chose i of (s_j, w_j) / 2,   p^_i = s_i / w_i

    At first s_i = p_i and w_i = 1. In every round each node keeps half of both and sends the other half to one random
    node. Sums over nodes stay, so all estimates tend to the mean.

    Args:
      label_distribution: p_i(y) of every node, `[nodes, classes]`, or other means, as in `greedy_swap`.
      rounds: number of rounds. With uniform peers, 30 give an error below 0.001.
      topology: nodes choose among their neighbours in this topology, in a directed one among those that they send to.
        It must stay the same in all rounds. Default: among all other nodes.
      seed: seed of the choices.

    Returns:
      The estimates `[nodes, classes]`.

    >>> from dcliques_jax import datasets, partitions
    >>> p = partitions.shards(datasets.synthetic(num_train=2000), 100, seed=1).label_distribution
    >>> bool(np.abs(push_sum_labels(p, 30) - p.mean(axis=0)).max() < 0.001)
    True
    """
    *_, last = _push_sum(label_distribution, rounds, topology, seed)
    return last


def push_sum_trajectory(
    label_distribution: npt.ArrayLike, rounds: int, *, topology: Any = None, seed: int = 0
) -> Estimation:
    """Measures `push_sum_labels`, with the same arguments, after every round.

    >>> Estimation(*push_sum_trajectory(np.eye(4), 2)).messages
    array([0., 1., 2.])
    """
    p = check_means(label_distribution)
    found = [np.abs(estimates - p.mean(axis=0)).sum(axis=1).max() for estimates in _push_sum(p, rounds, topology, seed)]
    messages = np.arange(len(found), dtype=np.float64)
    return Estimation(np.array(found), messages, messages * (p.shape[1] + 1) * _FLOAT)


def _push_sum(label_distribution: Any, rounds: int, topology: Any, seed: int) -> Iterator[np.ndarray]:
    """Yields the estimates after 0, 1, ... rounds."""
    p = check_means(label_distribution)
    rounds = _checks.integer("rounds", rounds, 0)
    choose = _peers(len(p), topology, _random.generator(seed))
    held = np.column_stack([p, np.ones(len(p))])  # s_i and w_i
    yield p
    for _ in range(rounds):
        half = held / 2
        held = half.copy()
        np.add.at(held, choose(), half)
        yield held[:, :-1] / held[:, -1:]


def _peers(num_nodes: int, topology: Any, rng: np.random.Generator) -> Any:
    """Returns a function that draws one other node for every node."""
    if topology is None:
        if num_nodes < 2:
            raise ValueError("a single node has no peers: use at least two nodes")
        return lambda: (np.arange(num_nodes) + rng.integers(1, num_nodes, num_nodes)) % num_nodes
    if not hasattr(topology, "arcs"):
        raise ValueError(f"topology={topology!r} is not a Topology: build one with dcliques_jax.topologies")
    if topology.drawn or len(topology.matrices or ()) > 1:
        raise ValueError(f"{topology.name} changes from round to round: pass a topology that stays, or omit topology")
    if topology.num_nodes != num_nodes:
        raise ValueError(f"the topology has {topology.num_nodes} nodes, the label distribution {num_nodes}")
    ends = topology.arcs  # (sender, receiver)
    if ends is None:
        ends = np.concatenate([topology.edges, topology.edges[:, ::-1]])
    ends = ends[np.argsort(ends[:, 0], kind="stable")]
    counts = np.bincount(ends[:, 0], minlength=num_nodes)
    if (counts == 0).any():
        raise ValueError(f"node {(counts == 0).argmax()} has no neighbour in {topology.name}")
    first = np.cumsum(counts) - counts
    return lambda: ends[first + rng.integers(counts), 1]


def decentralised_greedy_swap(
    label_distribution: npt.ArrayLike,
    clique_size: int,
    *,
    rounds: int = 200,
    seed: int = 0,
    estimates: npt.ArrayLike | None = None,
    message_loss: float = 0.0,
    online: npt.ArrayLike | None = None,
) -> np.ndarray:
    """Runs Greedy Swap by messages between nodes that know the members of their own clique and nothing else.

    Cliques start at random, and members tell each other their p_i. In every round each clique initiates with
    probability 1/2. The member with the lowest number asks a peer sampler for one random node. If that node is in
    another clique which takes part in no exchange yet, the initiator sends it the distributions of its clique. The node
    tries all exchanges of two members against its own estimate of the global distribution, chooses one at random that
    strictly lowers the sum of both skews, and answers. The two nodes that change places get the lists of their new
    cliques, and all others a notice. A clique stops initiating after twice as many answers in a row without an exchange
    as there are cliques.

    The random cliques, the peer sampler and the news of who is online or engaged in a clique cost nothing here.

    Sizes never change. With exact estimates the total skew never rises. `decentralised_trajectory` measures both skew
    and cost. The result is for `topologies.d_cliques(cliques=...)`.

    Args:
      label_distribution: p_i(y) of every node, `[nodes, classes]`, or other means, as in `greedy_swap`.
      clique_size: size M of the cliques. The last clique takes the remainder.
      rounds: number of rounds.
      seed: seed of the random cliques and of all draws.
      estimates: what each node believes of the global distribution, `[nodes, classes]`, such as `push_sum_labels`.
        Default: the exact one.
      message_loss: probability that a message is lost, at most 0.99. A question, an offer or an answer that is lost
        ends the attempt. Lists and notices are sent again until they arrive; nodes know which have.
      online: which nodes are online, booleans `[rounds, nodes]`, repeated if shorter. Nodes that are offline neither
        initiate nor answer, and keep their clique; they find lists and notices when they return. Default: all.

    Returns:
      The clique ids `[nodes]`.

    >>> from dcliques_jax import datasets, partitions
    >>> p = partitions.shards(datasets.synthetic(num_train=2000), 100, seed=1).label_distribution
    >>> ids = decentralised_greedy_swap(p, 10, rounds=100, estimates=push_sum_labels(p, 25))
    >>> bool(skew(ids, p).mean() < 0.06), bool(skew(random_cliques(100, 10), p).mean() > 0.3)
    (True, True)
    """
    arguments = (clique_size, rounds, seed, estimates, message_loss, online)
    return _Swaps(label_distribution, *arguments).run()[0]


def decentralised_trajectory(label_distribution: npt.ArrayLike, clique_size: int, **arguments: Any) -> Construction:
    """Measures `decentralised_greedy_swap`, with the same arguments, after every round.

    >>> decentralised_trajectory(np.eye(4), 2, rounds=3).skew.shape
    (4,)
    """
    known = {"rounds": 200, "seed": 0, "estimates": None, "message_loss": 0.0, "online": None}
    for name, value in arguments.items():
        if name not in known:
            raise ValueError(f"{name}={value!r} is unknown: choose among {', '.join(known)}")
    return _Swaps(label_distribution, clique_size, *(known | arguments).values()).run()[1]


class _Swaps:
    """The state of all nodes, and what they have sent."""

    def __init__(
        self,
        label_distribution: Any,
        clique_size: int,
        rounds: int,
        seed: int,
        estimates: Any,
        message_loss: float,
        online: Any,
    ) -> None:
        self.p = check_means(label_distribution)
        self.rounds = _checks.integer("rounds", rounds, 0)
        self.loss = _checks.real("message_loss", message_loss, 0, 0.99)
        self.ids = random_cliques(len(self.p), clique_size, seed=seed)
        self.believed = self._checked_estimates(estimates)
        self.online = self._checked_online(online)
        self.rounding = _ROUNDING * np.abs(self.p).max()
        self.cliques = [np.flatnonzero(self.ids == clique) for clique in range(self.ids.max() + 1)]
        self.failures = np.zeros(len(self.cliques), np.int64)
        self.rng = _random.generator(seed, 1)
        sizes = np.bincount(self.ids)
        self.messages = float((sizes * (sizes - 1)).sum())  # members tell each other their distributions
        self.bytes = self.messages * self.p.shape[1] * _FLOAT

    def _checked_estimates(self, estimates: Any) -> np.ndarray:
        if estimates is None:
            return np.tile(self.p.mean(axis=0), (len(self.p), 1))
        believed = np.asarray(estimates, np.float64)
        if believed.shape != self.p.shape:
            raise ValueError(f"estimates must be of shape {self.p.shape}, not {believed.shape}")
        if not np.isfinite(believed).all():
            row = int(np.isfinite(believed).all(axis=1).argmin())
            raise ValueError(f"row {row} of estimates, {believed[row].tolist()}, must be finite")
        return believed

    def _checked_online(self, online: Any) -> np.ndarray:
        if online is None:
            return np.ones((1, len(self.p)), bool)
        given = np.asarray(online)
        if given.ndim != 2 or given.shape[1] != len(self.p) or len(given) == 0:
            raise ValueError(f"online has shape {given.shape}: pass [rounds, nodes] for {len(self.p)} nodes")
        if (wrong := ~np.isin(given, (0, 1))).any():
            raise ValueError(f"online holds {given[wrong][0]}: pass True or False for every round and node")
        return given.astype(bool)

    def run(self) -> tuple[np.ndarray, Construction]:
        found = [self._measured()]
        for number in range(self.rounds):
            for initiator, node in self._engaged(self.online[number % len(self.online)]):
                self._attempt(initiator, node, self.online[number % len(self.online)])
            found.append(self._measured())
        return self.ids, Construction(*np.array(found).T)

    def _measured(self) -> tuple[float, float, float]:
        nodes = len(self.p)
        return float(skew(self.ids, self.p).mean()), self.messages / nodes, self.bytes / nodes

    def _engaged(self, online: np.ndarray) -> list[tuple[int, int]]:
        """Returns the cliques that initiate in a round, and the nodes that answer them."""
        count = len(self.cliques)
        busy = np.zeros(count, bool)
        found: list[tuple[int, int]] = []
        if count == 1:
            return found
        for clique in self.rng.permutation(count):
            starts = self.rng.random() < 0.5 and self.failures[clique] < 2 * count
            if not starts or busy[clique] or not online[self.cliques[clique]].any():
                continue
            asking = self.cliques[clique][online[self.cliques[clique]]][0]
            node = (asking + self.rng.integers(1, len(self.p))) % len(self.p)
            other = self.ids[node]
            if self._sent(_NUMBER) and online[node] and other != clique and not busy[other]:
                busy[[clique, other]] = True
                found.append((int(clique), int(node)))
        return found

    def _attempt(self, clique: int, node: int, online: np.ndarray) -> None:
        """Offers a clique to a node of another one, which may choose an exchange of two members that are online."""
        other, classes = int(self.ids[node]), self.p.shape[1]
        mine, theirs = (self.cliques[each] for each in (clique, other))
        if not self._sent(len(mine) * classes * _FLOAT):
            return
        deviation = self.p - self.believed[node]
        before, after = exchange_skews(deviation[mine], deviation[theirs])
        # Unlike in `greedy_swap`, exchanges that rounding alone calls better are left out: each would cost messages.
        better = np.argwhere((after < before - self.rounding) & online[mine][:, None] & online[theirs][None])
        if not self._sent(2 * _NUMBER):
            return
        self.failures[clique] += 1
        if len(better) == 0:
            return
        i, j = better[self.rng.integers(len(better))]
        self.ids[[mine[i], theirs[j]]] = other, clique
        self.cliques[clique] = np.sort(np.append(np.delete(mine, i), theirs[j]))
        self.cliques[other] = np.sort(np.append(np.delete(theirs, j), mine[i]))
        self.failures[[clique, other]] = 0
        for size in (len(mine), len(theirs)):
            self._delivered(1, size * classes * _FLOAT)  # the list of members
            self._delivered(size - 1, classes * _FLOAT)  # notices

    def _sent(self, size: int) -> bool:
        """Sends a message; returns whether it arrives."""
        self.messages += 1
        self.bytes += size
        return self.loss == 0 or bool(self.rng.random() >= self.loss)

    def _delivered(self, count: int, size: int) -> None:
        """Sends messages until all have arrived."""
        sent = count if self.loss == 0 or count == 0 else int(self.rng.geometric(1 - self.loss, count).sum())
        self.messages += sent
        self.bytes += sent * size
