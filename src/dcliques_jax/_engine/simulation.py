"""Simulations, which run and evaluate on request."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dcliques_jax import _checks, algorithms, mixing
from dcliques_jax._engine import cache_key, interrupts, layout, outages, program, state
from dcliques_jax._engine.evaluation import Evaluation
from dcliques_jax._engine.plan import Plan, Recipe, Run
from dcliques_jax._engine.program import Carry, Program
from dcliques_jax._engine.tally import RoundTraffic, Tally
from dcliques_jax._mesh import transfer
from dcliques_jax.algorithms import Network
from dcliques_jax.results import MEASURED, Record, State

_MOST_ROUNDS = 1024  # per call of the program
_MOST_LOSSES = 2**18  # that a call returns, one per node and round
_PACE = 0.5  # seconds between two checks for Ctrl-C


def never() -> bool:
    """Returns False: no interruption."""
    return False


class Simulation:
    """Runs that the caller advances with `run` and measures with `evaluate`. Make one with `dcliques_jax.prepare`.

    With `prepare(seeds=...)` all arrays have the seeds on their first axis.
    """

    def __init__(
        self,
        runs: list[Run],
        plan: Plan,
        recipe: Recipe,
        networks: list[Network],
        *,
        mesh: Mesh | None,
        axes: tuple[int, ...],
        on_nonfinite: str,
    ) -> None:
        self.plan, self._axes = plan, axes
        self.layout = layout.make_layout(runs, recipe, mesh)
        self._on_nonfinite, self._warned, self._pace = on_nonfinite, False, 1
        self._starts: list[State] = state.start(self.layout, networks)
        self._keys = np.stack([start.key for start in self._starts])
        self.tally = Tally.after(int(self._starts[0].round), len(runs), runs[0].data.num_nodes)
        self._network = layout.store_network(self.layout, networks)
        first = self._starts[0]
        one_node = jax.tree.map(lambda leaf: leaf[0], (first.params, first.model))
        each = zip(runs, networks, strict=True)
        self._sent = [_sent(recipe.sends(run), network, one_node) for run, network in each]
        self._data = layout.host_data(self.layout, plan, list(self._keys))
        self._on_one_device = self._lower_on_one_device(networks)
        self._carry: Carry | None = None
        self._program: Any = None
        self._evaluation: Evaluation | None = None

    def __repr__(self) -> str:
        run = self.layout.runs[0]
        return f"Simulation({run.topology.name!r}, num_nodes={run.data.num_nodes}, round={self.round})"

    # Public level

    @property
    def round(self) -> int:
        """Number of rounds so far."""
        return self.tally.round

    @property
    def params(self) -> Any:
        """Copy of the models of all nodes, a pytree of arrays `[nodes, ...]` in the order of the topology."""
        return self.state.params

    @property
    def state(self) -> State:
        """Copy of the state in the order of the topology, for `simulate(init=...)`."""
        return self.of_user(self.state_of_runs())

    def run(self, rounds: int) -> None:
        """Runs some rounds. The first call compiles them; later calls, with any number of rounds, compile nothing.

        Ctrl-C raises `KeyboardInterrupt` after the current rounds, and the simulation can go on from there.

        Args:
          rounds: number of rounds to run.
        """
        stop = self.round + _checks.integer("rounds", rounds, 0)
        with interrupts.noticed() as interrupted:  # Ctrl-C inside a call would leave state and losses apart
            self.advance(stop, interrupted)
        if self.round < stop:
            raise KeyboardInterrupt

    def evaluate(self) -> Record:
        """Measures all models. `train_loss` covers the rounds since the last evaluation."""
        record = self.record()
        assert record is not None
        return self.for_user(record)

    # For the loop

    def begin(self, starts: list[State] | None = None, tally: Tally | None = None) -> None:
        """Compiles the rounds and stores states, by default the initial ones, on the devices."""
        if starts is not None and tally is not None:
            self._starts, self.tally = starts, tally
        self._carry = state.store(self.layout, self.plan, self._starts, self._data, outages.have_pairs(self._network))
        data, examples = layout.store_data(self.layout, self._data), layout.store_examples(self.layout)
        lowered = self._on_one_device
        if self.layout.mesh is not None:
            lowered = self._lower(self.layout, self._carry, self._network, data, examples)
        self._constants = (self._network, data, examples)
        self._program = lowered.compile(self.layout.mesh)

    def advance(
        self, stop: int, interrupted: Callable[[], bool] = never, on_rounds: Callable[[int], Any] = lambda _: None
    ) -> None:
        """Runs up to round `stop` or until interrupted, in calls of about half a second or at least one round.

        `on_rounds` is called with the number of rounds of each call.
        """
        if self._program is None:
            self.begin()
        while self.round < stop:
            count = 0 if interrupted() else min(stop - self.round, self._pace)
            count = transfer.of_first_process(count)  # all processes must agree
            if count == 0:
                break
            started = time.monotonic()
            measured = self._run(count)
            seconds = max(time.monotonic() - started, 1e-9)
            before, numbers = self.round, np.arange(self.round, self.round + count)
            sent = np.stack([of_run[..., numbers % of_run.shape[-1]] for of_run in self._sent], axis=2)
            self.tally = self.tally.plus(measured, RoundTraffic(*sent))
            self._complain(_nonfinite_losses(self.layout.runs, before, measured[0]))
            self._pace = int(np.clip(_PACE * count / seconds, 1, _most_rounds(self.layout)))
            on_rounds(count)

    def _run(self, count: int) -> tuple[np.ndarray, ...]:
        """Runs `count` rounds in one call; returns what `Tally` adds up, `[runs, rounds, nodes]`."""
        self._carry, measured = self._program(self._carry, *self._constants, count)
        return tuple(self.layout.of_nodes(values[:, :count]) for values in jax.device_get(measured))

    def prepare_evaluation(self) -> None:
        """Compiles the evaluation if it is not compiled yet."""
        if self._program is None:
            self.begin()
        if self._evaluation is None:
            assert self._carry is not None
            self._evaluation = Evaluation(self.layout, self.plan, self._carry, self._constants[1].nodes)

    def record(self, interrupted: Callable[[], bool] = never) -> Record | None:
        """Measures all models, with the axis of runs; returns None if interrupted."""
        self.prepare_evaluation()
        assert self._evaluation is not None
        assert self._carry is not None
        measured = self._evaluation(self._carry, interrupted)
        if measured is None:
            return None
        self._complain(_nonfinite_models(self, measured.pop("finite"), measured["loss"]))
        measured |= self.tally.means()
        self.tally = self.tally.evaluated()
        number = self.round

        def models() -> Any:
            if self.round != number:
                raise ValueError(
                    f"the models of round {number} are gone, the run is at round {self.round}: call params() before "
                    "the run goes on"
                )
            return self.state_of_runs().params

        return Record(round=number, epoch=number / self.plan.rounds_per_epoch, models=models, **measured)

    def state_of_runs(self) -> State:
        """Returns the state of all runs in the order of the topology, with the axis of runs, on the host."""
        if self._carry is None:
            self.begin()
        assert self._carry is not None
        return state.in_topology_order(self.layout, self._carry, self._keys, outages.have_pairs(self._network))

    def of_user(self, tree: Any) -> Any:
        """Removes the axis of runs unless the user passed `seeds`."""
        return jax.tree.map(lambda leaf: leaf.reshape((*self._axes, *leaf.shape[1:])), tree)

    def for_user(self, record: Record) -> Record:
        """Returns a read-only record, without the axis of runs unless the user passed `seeds`."""
        for array in jax.tree.leaves([record.extra, *(getattr(record, name) for name in MEASURED)]):
            array.flags.writeable = False  # a callback must not change history
        measured: dict[str, Any] = {name: self.of_user(getattr(record, name)) for name in MEASURED}
        measured["extra"] = {name: self.of_user(values) for name, values in record.extra.items()}  # keeps their order
        models = None if record.models is None else lambda: self.of_user(record.models())  # type: ignore[misc]
        return dataclasses.replace(record, **measured, models=models)

    @property
    def starts(self) -> list[State]:
        """The initial states; empty after `begin`."""
        return self._starts

    @property
    def checksum(self) -> str:
        """Checksum of the rounds as lowered for one device, so that it does not depend on the mesh."""
        return self._on_one_device.checksum

    def memory(self) -> int:
        """Returns the peak device memory of a round in bytes, including data."""
        if self._program is None:
            self.begin()
        needs: Any = self._program.memory_analysis()
        held: int = needs.argument_size_in_bytes + needs.output_size_in_bytes - needs.alias_size_in_bytes
        return held + int(needs.temp_size_in_bytes)

    def _lower_on_one_device(self, networks: list[Network]) -> cache_key.Lowered:
        ours, data, network = self.layout, self._data, self._network
        if ours.mesh is not None:
            ours = layout.make_layout(ours.runs, ours.recipe, None)
            data = layout.host_data(ours, self.plan, list(self._keys))
            network = layout.store_network(ours, networks)

        def carry(*starts: State) -> Carry:
            orders = np.zeros((ours.num_slots, self.plan.order_width), np.int32)
            return layout.stack_runs([state.carry_of(start, orders) for start in starts])

        shapes = jax.eval_shape(carry, *self._starts)
        return self._lower(ours, shapes, network, data, layout.host_examples(ours.runs[0].data.dataset))

    def _lower(self, ours: layout.Layout, carry: Any, network: Any, data: Any, examples: Any) -> cache_key.Lowered:
        """Lowers the program of rounds."""
        recipe, plan = ours.recipe, self.plan
        faults = recipe.faults_of(ours.runs[0])
        make_step = functools.partial(_step_of, recipe.factory)
        if not ours.runs[0].values:  # without the algorithm's matrices, which are arguments of the program
            make_step = functools.partial(_given, recipe.factory().step)
        drawing = {"augment": recipe.augment is not None, "model": recipe.model.draws}
        parts = Program(
            recipe.model.apply,
            recipe.loss_fn,
            make_step,
            plan.batch_size,
            plan.rounds_per_epoch,
            faults,
            recipe.augment,
            frozenset(name for name, draws in drawing.items() if draws),
            recipe.model.gossip_state,
            plan.sampling,
        )
        options: dict[str, Any] = {"most_rounds": _most_rounds(ours), "mesh": ours.mesh}
        return cache_key.lower(program.run, parts, carry, network, data, examples, 1, donate=(0,), **options)

    def _complain(self, trouble: str | None) -> None:
        """Raises an error about non-finite numbers, or warns once."""
        if trouble and self._on_nonfinite == "raise":
            raise FloatingPointError(f"{trouble}. Lower the learning rate, or pass on_nonfinite='warn' to continue.")
        if trouble and not self._warned:
            _checks.warn(trouble, RuntimeWarning)
            self._warned = True


def _step_of(factory: Any, **values: Any) -> Any:
    return factory(**values).step


def _given(step: Any) -> Any:
    return step


def _sent(sends: Any, network: Network, one_node: Any) -> np.ndarray:
    """Returns messages, bytes and entries of all nodes over each matrix and in each turn, `[3, matrices, turns]`."""

    def of_matrices(sends: Any) -> list[np.ndarray]:
        """Returns messages and bytes over the gossip matrix, and what the other adds, `[2, turns]` each."""
        alone = network._replace(gradients=mixing.Identity(network.gossip.num_nodes))
        both, gossip = (np.stack([part.sum(axis=1) for part in sends(each, one_node)[:2]]) for each in (network, alone))
        return [gossip, both - np.tile(gossip, both.shape[1] // gossip.shape[1])]

    entries = [part[0] for part in of_matrices(algorithms.sends())]
    told = [np.full((2, 1), np.nan)] * 2 if sends is None else of_matrices(sends)
    turns = math.lcm(*(part.shape[-1] for part in (*entries, *told)))
    messages_and_bytes = np.stack([np.tile(part, turns // part.shape[-1]) for part in told], axis=1)
    counted = np.stack([np.tile(part, turns // len(part)) for part in entries])
    return np.concatenate([messages_and_bytes, counted[None]]).astype(np.float64)


def _most_rounds(layout: layout.Layout) -> int:
    """Returns the maximum number of rounds per call, which bounds the memory of their losses."""
    return int(np.clip(_MOST_LOSSES // layout.num_slots, 1, _MOST_ROUNDS))


def _nonfinite_losses(runs: list[Run], before: int, losses: np.ndarray) -> str | None:
    """Describes the first infinite or NaN loss in the rounds after `before`; None if all are finite."""
    for run, of_run in zip(runs, losses, strict=True):
        bad = ~np.isfinite(of_run)  # [rounds, nodes]
        if bad.any():
            row = int(bad.any(axis=1).argmax())
            return _where("training loss", before + row + 1, np.flatnonzero(bad[row]), _of_seed(runs, run))
    return None


def _nonfinite_models(simulation: Simulation, all_finite: np.ndarray, losses: np.ndarray) -> str | None:
    """Describes the models with infinite or NaN parameters or test losses; None if all are finite."""
    runs, number = simulation.layout.runs, simulation.round
    for run, finite, loss in zip(runs, all_finite, losses, strict=True):
        if not finite.all():
            return _where("parameters", number, np.flatnonzero(~finite), _of_seed(runs, run))
        if not np.isfinite(loss).all():
            bad = simulation.plan.nodes(run)[~np.isfinite(loss)]
            return _where("test loss", number, bad, _of_seed(runs, run))
    return None


def _of_seed(runs: list[Run], run: Run) -> str:
    if run.values:
        return " with " + ", ".join(f"{name}={value:g}" for name, value in run.values.items())
    return "" if len(runs) == 1 else f" of seed {run.seed}"


def _where(what: str, after: int, nodes: np.ndarray, of_seed: str) -> str:
    others = f" and {len(nodes) - 1} others" if len(nodes) > 1 else ""
    return f"non-finite {what} in round {after} at node {nodes[0]}{others}{of_seed}"
