"""The loop from one evaluation to the next: progress, callbacks, checkpoints and Ctrl-C."""

import contextlib
import dataclasses
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from dcliques_jax._engine.plan import Plan, Run, Schedule
from dcliques_jax._engine.simulation import Simulation, never
from dcliques_jax._store.checkpoints import Checkpoints
from dcliques_jax.results import MEASURED, History, Record, State


@dataclasses.dataclass
class Callbacks:
    """Callbacks at evaluations and between them."""

    on_evaluation: Callable[[Record], Any]
    progress: bool
    interrupted: Callable[[], bool]  # whether Ctrl-C was pressed
    may_stop: bool = True

    def wants_to_stop(self, record: Record) -> bool:
        """Calls the user's callback and returns whether to stop."""
        answer = self.on_evaluation(record)
        # A boolean scalar of any kind stops. Loggers may return other values, which do not.
        arrays_too = isinstance(answer, (np.ndarray, jax.Array)) and answer.shape == () and answer.dtype == np.bool_
        return self.may_stop and (arrays_too or isinstance(answer, (bool, np.bool_))) and bool(answer)


class Outcome(NamedTuple):
    """Outcome of runs that were simulated together. Arrays have the runs on their first axis."""

    state: State  # in the order of the topology
    records: list[Record]
    program: str  # checksum of the compiled program
    memory: int  # peak device memory of a round, in bytes
    interrupted: bool  # whether Ctrl-C stopped the runs


def train(
    simulation: Simulation,
    schedule: Schedule,
    callbacks: Callbacks,
    checkpoints: Checkpoints,
    identity: Callable[[], dict[str, Any]],
) -> Outcome:
    """Runs a simulation by its schedule, starting from the last checkpoint."""
    per_epoch = simulation.plan.rounds_per_epoch
    restored = checkpoints.restore(identity, simulation.starts, schedule, per_epoch)
    starts, records, tally = restored or (None, [], None)
    # Replay restored records, so that a callback that counts or stops behaves as before.
    stopped = [callbacks.wants_to_stop(simulation.for_user(record)) for record in records][-1:] == [True]
    schedule = schedule.after([record.round for record in records], tally.round if tally else schedule.evaluated[0])
    interrupted, memory = False, 0
    with _progress_bar(simulation, schedule, callbacks.progress) as bar:
        with _compiling(bar):
            simulation.begin(starts, tally)
            simulation.prepare_evaluation()
        bar.update(simulation.round - schedule.evaluated[0])
        if len(schedule.evaluated) > 1:
            memory = simulation.memory()
            if not bar.disable:
                bar.write(f"{bar.desc}: a round takes {memory / 1e6:,.0f} MB of memory", file=sys.stderr)
        for stop in schedule.evaluated[len(records) :]:
            if stopped:
                break
            simulation.advance(stop, callbacks.interrupted, bar.update)
            if interrupted := simulation.round < stop:
                break
            # A result has at least one evaluation.
            record = simulation.record(callbacks.interrupted if records else never)
            if interrupted := record is None:
                break
            records.append(record)
            if checkpoints.due():
                checkpoints.save(simulation.state_of_runs(), records, simulation.tally)
            bar.set_postfix(_shown(record))
            stopped = callbacks.wants_to_stop(simulation.for_user(record))
    state = simulation.state_of_runs()
    checkpoints.save(state, records, simulation.tally)
    # `models` would keep the simulation in the memory of the devices, beside the next group of runs.
    records = [dataclasses.replace(record, models=None) for record in records]
    return Outcome(state, records, simulation.checksum, memory, interrupted)


def _shown(record: Record) -> dict[str, str]:
    name, values = ("loss", record.loss) if np.isnan(record.accuracy).all() else ("accuracy", record.accuracy)
    return {name: f"{values.min():.3f} / {values.mean():.3f} / {values.max():.3f}"}


def _progress_bar(simulation: Simulation, schedule: Schedule, wanted: bool) -> Any:
    """Returns a progress bar, disabled outside terminals and notebooks."""
    with warnings.catch_warnings(action="ignore"):  # a notebook without ipywidgets gets a text bar
        from tqdm.auto import tqdm

    runs = simulation.layout.runs
    name = runs[0].topology.name + ("" if len(runs) == 1 else f", {len(runs)} runs")
    terminal = getattr(sys.stderr, "isatty", lambda: False)()  # stderr may be None
    seen = (terminal or "ipykernel" in sys.modules) and "PYTEST_CURRENT_TEST" not in os.environ
    seen = seen and jax.process_index() == 0
    length = schedule.evaluated[-1] - schedule.evaluated[0]
    return tqdm(total=length, unit="round", desc=name, disable=not (wanted and seen))


@contextlib.contextmanager
def _compiling(bar: Any) -> Iterator[None]:
    """Shows on the progress bar for how long programs have been compiling."""
    if bar.disable:
        yield
        return
    name, started, finished = bar.desc, time.monotonic(), threading.Event()

    def tell() -> None:
        while not finished.wait(1):
            bar.set_description_str(f"{name}, compiling for {time.monotonic() - started:.0f} s")

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        finished.set()
        teller.join()
        bar.set_description_str(name)
        bar.unpause()  # the bar measures the time of rounds only


def make_history(outcomes: list[Outcome], runs: list[Run], plan: Plan, of_user: Callable[[Any], Any]) -> History:
    """Combines the records of all runs, which have the same schedule, into a history."""

    def together(name: str, extra: bool = False) -> np.ndarray:
        columns = [
            np.stack([(record.extra[name] if extra else getattr(record, name)) for record in outcome.records], axis=1)
            for outcome in outcomes
        ]
        return of_user(np.concatenate(columns))

    rounds = np.array([record.round for record in outcomes[0].records])
    return History(
        round=rounds,
        epoch=rounds / plan.rounds_per_epoch,
        eval_nodes=of_user(np.stack([plan.nodes(run) for run in runs])),
        eval_examples=of_user(np.stack([plan.examples(run) for run in runs])),
        extra={name: together(name, extra=True) for name in outcomes[0].records[0].extra},
        **{name: together(name) for name in MEASURED},
    )
