"""What rounds measure, added up on the host in float64."""

from typing import NamedTuple

import numpy as np


class RoundTraffic(NamedTuple):
    """What all nodes send in some rounds over each matrix, `[matrices, runs, rounds]`; NaN if unknown."""

    messages: np.ndarray
    bytes: np.ndarray
    entries: np.ndarray  # number of messages if every entry of a matrix is one


class Tally(NamedTuple):
    """Sums over rounds: losses since the last evaluation, and messages since the start."""

    round: int  # number of rounds so far
    sums: np.ndarray  # [runs, nodes] sum of the losses of all examples that a node has seen since the last evaluation
    counts: np.ndarray  # [runs, nodes] number of these examples
    online: np.ndarray  # [runs] sum over these rounds of the number of nodes that took part
    rounds: int  # number of these rounds
    sent: np.ndarray  # [runs] number of messages so far; NaN if unknown
    lost: np.ndarray  # [runs] number of those that did not arrive
    bytes: np.ndarray  # [runs] size of all messages; NaN if unknown

    @classmethod
    def after(cls, number: int, num_runs: int, num_nodes: int) -> "Tally":
        """Returns empty sums that start after round `number`."""
        zeros, none = np.zeros((num_runs, num_nodes)), np.zeros(num_runs)
        return cls(number, zeros, zeros.astype(np.int64), none, 0, none, none, none)

    def evaluated(self) -> "Tally":
        """Returns the tally after an evaluation. Messages go on."""
        return self.after(self.round, *self.sums.shape)._replace(sent=self.sent, lost=self.lost, bytes=self.bytes)

    def plus(self, measured: tuple[np.ndarray, ...], traffic: "RoundTraffic") -> "Tally":
        """Adds further rounds.

        Args:
          measured: mean losses of batches and batch sizes, `[runs, rounds, nodes]`. Under faults also the number of
            messages to each node over each matrix, how many of each were lost, and whether the node took part.
          traffic: what is sent in these rounds without faults.
        """
        sent, size, entries = traffic
        losses, counts, *faulty = measured
        sums = self.sums.copy()
        for row in np.moveaxis(losses * counts, 1, 0):  # one by one, for the same bits however rounds are grouped
            sums += row
        online, lost = np.full(losses.shape[:2], losses.shape[2]), np.zeros_like(sent)
        if faulty:
            *of_matrices, online = (values.sum(axis=2) for values in faulty)
            to_nodes, lost = np.split(np.stack(of_matrices), 2)
            # Faults are counted per entry of a matrix. The algorithm says how many messages an entry is.
            each, size_of_each = (
                np.divide(amount, entries, out=np.zeros(sent.shape), where=entries > 0) for amount in (sent, size)
            )
            sent, size, lost = each * to_nodes, size_of_each * to_nodes, each * lost
        return Tally(
            self.round + losses.shape[1],
            sums,
            self.counts + counts.sum(axis=1),
            self.online + online.sum(axis=1),
            self.rounds + losses.shape[1],
            self.sent + sent.sum(axis=(0, 2)),
            self.lost + lost.sum(axis=(0, 2)),
            self.bytes + size.sum(axis=(0, 2)),
        )

    def means(self) -> dict[str, np.ndarray]:
        """Returns the measurements of `results.Measured` by name, with the runs on the first axis.

        The mean loss of a node that saw no example is NaN, and so is the number of nodes online before training.
        """
        blank, nodes = np.full(self.sums.shape, np.nan), self.sums.shape[1]
        return {
            "train_loss": np.divide(self.sums, self.counts, out=blank, where=self.counts > 0),
            "messages": self.sent / nodes,
            "messages_lost": self.lost / nodes,
            "bytes": self.bytes / nodes,
            "nodes_online": self.online / self.rounds if self.rounds else np.full(len(self.online), np.nan),
        }
