"""Training losses between two evaluations, summed on the host in float64."""

from typing import NamedTuple

import numpy as np


class Losses(NamedTuple):
    """Training losses of the rounds since the last evaluation."""

    round: int  # number of rounds so far
    sums: np.ndarray  # [runs, nodes] sum of the losses of all examples that a node has seen
    counts: np.ndarray  # [runs, nodes] number of these examples

    @classmethod
    def after(cls, number: int, num_runs: int, num_nodes: int) -> "Losses":
        """Returns empty sums that start after round `number`."""
        return cls(number, np.zeros((num_runs, num_nodes)), np.zeros((num_runs, num_nodes), np.int64))

    def plus(self, losses: np.ndarray, counts: np.ndarray) -> "Losses":
        """Adds further rounds: mean losses of batches and batch sizes, `[runs, rounds, nodes]`."""
        sums = self.sums.copy()
        for row in np.moveaxis(losses * counts, 1, 0):  # one by one, for the same bits however rounds are grouped
            sums += row
        return Losses(self.round + losses.shape[1], sums, self.counts + counts.sum(axis=1))

    def means(self) -> np.ndarray:
        """Returns the mean loss of each node, `[runs, nodes]`; NaN if it saw no example."""
        return np.divide(self.sums, self.counts, out=np.full(self.sums.shape, np.nan), where=self.counts > 0)
