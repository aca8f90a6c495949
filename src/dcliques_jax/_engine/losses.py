"""Training losses between two evaluations, added up on the host in float64."""

from typing import NamedTuple

import numpy as np


class Losses(NamedTuple):
    """Of the rounds since the last evaluation."""

    round: int  # rounds run so far
    sums: np.ndarray  # [runs, nodes] losses of all examples that a node has seen
    counts: np.ndarray  # [runs, nodes] their number

    @classmethod
    def after(cls, number: int, num_runs: int, num_nodes: int) -> "Losses":
        """None yet, since a round."""
        return cls(number, np.zeros((num_runs, num_nodes)), np.zeros((num_runs, num_nodes), np.int64))

    def plus(self, losses: np.ndarray, counts: np.ndarray) -> "Losses":
        """With those of further rounds: mean losses of batches and their sizes, `[runs, rounds, nodes]`."""
        sums = self.sums.copy()
        for row in np.moveaxis(losses * counts, 1, 0):  # one by one: the same bits however rounds are divided
            sums += row
        return Losses(self.round + losses.shape[1], sums, self.counts + counts.sum(axis=1))

    def means(self) -> np.ndarray:
        """Mean loss of each node, `[runs, nodes]`; NaN where it saw no example."""
        return np.divide(self.sums, self.counts, out=np.full(self.sums.shape, np.nan), where=self.counts > 0)
