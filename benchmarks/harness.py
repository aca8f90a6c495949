"""What all benchmarks share: how time is taken, and what a line of the table holds."""

import dataclasses
import functools
import time

import numpy as np


@dataclasses.dataclass
class Line:
    """One measurement, and what it is held against."""

    question: str
    workload: str
    subject: str
    best: float
    median: float
    against: str = ""
    against_best: float | None = None
    goal: str = ""  # for the ratio
    note: str = ""
    unit: str = "s"

    @property
    def ratio(self):
        """How many times as much the other side takes."""
        return None if self.against_best is None else self.against_best / self.best


def interleaved(functions, repeats, warm_up=1):
    """Seconds of each call, `{name: [repeats]}`: all by turns, so that a noisy machine is noisy for all."""
    seconds = {name: [] for name in functions}
    for turn in range(warm_up + repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if turn >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def per_round(functions, repeats, rounds):
    """Seconds of a round, `{name: (minimum, median)}`; each function takes a number of rounds."""
    seconds = interleaved({name: functools.partial(run, rounds) for name, run in functions.items()}, repeats)
    return {name: (min(found) / rounds, float(np.median(found)) / rounds) for name, found in seconds.items()}


def fastest(times, names):
    """Of some subjects the one with the least time."""
    return min(names, key=lambda name: times[name][0])
