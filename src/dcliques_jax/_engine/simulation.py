"""Runs that go forward: rounds and evaluations, whenever they are asked for."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dcliques_jax import _checks
from dcliques_jax._engine import cache_key, layout, program, state
from dcliques_jax._engine.evaluation import Evaluation
from dcliques_jax._engine.losses import Losses
from dcliques_jax._engine.plan import Plan, Recipe, Run
from dcliques_jax._engine.program import Carry, Program
from dcliques_jax._mesh import transfer
from dcliques_jax.algorithms import Network
from dcliques_jax.results import MEASURED, Record, State

_MOST_ROUNDS = 1024  # that are run at a time
_MOST_LOSSES = 2**18  # that they return: as many as there are nodes in every round
_PACE = 0.5  # seconds of rounds between two looks at Ctrl-C


def never() -> bool:
    """Nobody presses Ctrl-C."""
    return False


class Simulation:
    """Runs that go forward when told to; `dcliques_jax.prepare` makes one.

    With `seeds=` everything has the seeds on its first axis.
    """

    def __init__(
        self,
        runs: list[Run],
        plan: Plan,
        recipe: Recipe,
        networks: list[Network],
        *,
        mesh: Mesh | None,
        one_run: bool,
        on_nonfinite: str,
    ) -> None:
        self.plan, self.one_run = plan, one_run
        self.layout = layout.make_layout(runs, recipe, mesh)
        self._on_nonfinite, self._warned, self._pace = on_nonfinite, False, 1
        self._starts: list[State] = state.start(self.layout, networks)
        self._keys = np.stack([start.key for start in self._starts])
        self.losses = Losses.after(int(self._starts[0].round), len(runs), runs[0].data.num_nodes)
        self._network = layout.store_network(self.layout, networks)
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
        """Rounds run so far."""
        return self.losses.round

    @property
    def params(self) -> Any:
        """The models of all nodes, a pytree of arrays `[nodes, ...]` in the order of the topology; a copy."""
        return self.state.params

    @property
    def state(self) -> State:
        """All that the next round needs, in the order of the topology; a copy, for `simulate(init=...)`."""
        return self.of_user(self.state_of_runs())

    def run(self, rounds: int) -> None:
        """Runs that many rounds.

        The first call compiles the rounds; later ones, of any number of rounds, compile nothing.
        """
        self.advance(self.round + rounds)

    def evaluate(self) -> Record:
        """Measures all models; `train_loss` is that of the rounds since the last evaluation."""
        record = self.record()
        assert record is not None
        return self.for_user(record)

    # For the loop

    def begin(self, starts: list[State] | None = None, losses: Losses | None = None) -> None:
        """Compiles the rounds and puts states, by default those before the first round, on the devices."""
        if starts is not None and losses is not None:
            self._starts, self.losses = starts, losses
        self._carry = state.store(self.layout, self.plan, self._starts, self._data)
        data, examples = layout.store_data(self.layout, self._data), layout.store_examples(self.layout)
        lowered = self._on_one_device
        if self.layout.mesh is not None:
            lowered = self._lower(self.layout, self._carry, self._network, data, examples)
        self._constants = (self._network, data, examples)
        self._program = lowered.compile(self.layout.mesh)

    def advance(
        self, stop: int, interrupted: Callable[[], bool] = never, on_rounds: Callable[[int], Any] = lambda _: None
    ) -> None:
        """Runs up to round `stop`, or until it is interrupted: about half a second at a time, or a round.

        `on_rounds` is told how many rounds were run.
        """
        if self._program is None:
            self.begin()
        while self.round < stop:
            count = 0 if interrupted() else min(stop - self.round, self._pace)
            count = transfer.of_first_process(count)  # all processes must do the same
            if count == 0:
                break
            started = time.monotonic()
            losses, counts = self._run(count)
            seconds = max(time.monotonic() - started, 1e-9)
            self._complain(_nonfinite_losses(self.layout.runs, self.round, losses))
            self.losses = self.losses.plus(losses, counts)
            self._pace = int(np.clip(_PACE * count / seconds, 1, _most_rounds(self.layout)))
            on_rounds(count)

    def _run(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Runs some rounds at once; their losses and batch sizes, `[runs, rounds, nodes]`."""
        self._carry, measured = self._program(self._carry, *self._constants, count)
        losses, counts = (self.layout.of_nodes(values[:, :count]) for values in jax.device_get(measured))
        return losses, counts

    def prepare_evaluation(self) -> None:
        """Compiles the evaluation, if that was not done."""
        if self._program is None:
            self.begin()
        if self._evaluation is None:
            assert self._carry is not None
            self._evaluation = Evaluation(self.layout, self.plan, self._carry, self._constants[1].nodes)

    def record(self, interrupted: Callable[[], bool] = never) -> Record | None:
        """What is measured now, with the axis of runs; None if that was interrupted."""
        self.prepare_evaluation()
        assert self._evaluation is not None
        assert self._carry is not None
        measured = self._evaluation(self._carry.params, interrupted)
        if measured is None:
            return None
        self._complain(_nonfinite_models(self, measured.pop("finite"), measured["loss"]))
        measured["train_loss"] = self.losses.means()
        runs = self.layout.runs
        self.losses = Losses.after(self.round, len(runs), runs[0].data.num_nodes)
        epoch = self.round / self.plan.rounds_per_epoch
        return Record(round=self.round, epoch=epoch, models=lambda: self.state_of_runs().params, **measured)

    def state_of_runs(self) -> State:
        """The state of all runs in the order of the topology, with the axis of runs, on the host."""
        if self._carry is None:
            self.begin()
        assert self._carry is not None
        return state.in_topology_order(self.layout, self._carry, self._keys)

    def of_user(self, tree: Any) -> Any:
        """Arrays without the axis of runs if the user knows of none."""
        return jax.tree.map(lambda leaf: leaf[0], tree) if self.one_run else tree

    def for_user(self, record: Record) -> Record:
        """A record that cannot be changed, without the axis of runs if the user knows of none."""
        measured = {name: getattr(record, name) for name in (*MEASURED, "extra")}
        for array in jax.tree.leaves(measured):
            array.flags.writeable = False  # a callback must not change history
        models = None if record.models is None else lambda: self.of_user(record.models())  # type: ignore[misc]
        return dataclasses.replace(record, **self.of_user(measured), models=models)

    @property
    def starts(self) -> list[State]:
        """The states before the first round, until the simulation begins."""
        return self._starts

    @property
    def checksum(self) -> str:
        """Of the compiled rounds as they are on one device, whatever the mesh: what is computed, not where."""
        return self._on_one_device.checksum

    def memory(self) -> int:
        """Bytes of device memory that rounds take at their peak, data and all."""
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
            orders = np.zeros((ours.num_slots, self.plan.width), np.int32)
            return layout.stack_runs([Carry(s.params, s.algorithm, orders, s.round) for s in starts])

        shapes = jax.eval_shape(carry, *self._starts)
        return self._lower(ours, shapes, network, data, layout.host_examples(ours.runs[0].data.dataset))

    def _lower(self, ours: layout.Layout, carry: Any, network: Any, data: Any, examples: Any) -> cache_key.Lowered:
        """The program of rounds, before it is compiled."""
        recipe, plan = ours.recipe, self.plan
        step = recipe.algorithm.step
        parts = Program(recipe.model.apply, recipe.loss_fn, step, plan.batch_size, plan.rounds_per_epoch)
        options: dict[str, Any] = {"most_rounds": _most_rounds(ours), "mesh": ours.mesh}
        return cache_key.lower(program.run, parts, carry, network, data, examples, 1, donate=(0,), **options)

    def _complain(self, trouble: str | None) -> None:
        """Raises an error for non-finite numbers, or warns once."""
        if trouble and self._on_nonfinite == "raise":
            raise FloatingPointError(f"{trouble}. Lower the learning rate, or pass on_nonfinite='warn' to go on.")
        if trouble and not self._warned:
            _checks.warn(trouble, RuntimeWarning)
            self._warned = True


def _most_rounds(layout: layout.Layout) -> int:
    """Rounds to run at a time. Their losses must fit into little memory, however seldom models are evaluated."""
    return int(np.clip(_MOST_LOSSES // layout.num_slots, 1, _MOST_ROUNDS))


def _nonfinite_losses(runs: list[Run], before: int, losses: np.ndarray) -> str | None:
    """Where the first infinite or NaN loss appeared in the rounds after `before`, if any did."""
    for run, of_run in zip(runs, losses, strict=True):
        bad = ~np.isfinite(of_run)  # [rounds, nodes]
        if bad.any():
            row = int(bad.any(axis=1).argmax())
            return _where("training loss", before + row + 1, np.flatnonzero(bad[row]), _of_seed(runs, run))
    return None


def _nonfinite_models(simulation: Simulation, all_finite: np.ndarray, losses: np.ndarray) -> str | None:
    """Which models have infinite or NaN parameters or test losses now, if any have."""
    runs, number = simulation.layout.runs, simulation.round
    for run, finite, loss in zip(runs, all_finite, losses, strict=True):
        if not finite.all():
            return _where("parameters", number, np.flatnonzero(~finite), _of_seed(runs, run))
        if not np.isfinite(loss).all():
            bad = simulation.plan.nodes(run)[~np.isfinite(loss)]
            return _where("test loss", number, bad, _of_seed(runs, run))
    return None


def _of_seed(runs: list[Run], run: Run) -> str:
    return "" if len(runs) == 1 else f" of seed {run.seed}"


def _where(what: str, after: int, nodes: np.ndarray, of_seed: str) -> str:
    others = f" and {len(nodes) - 1} others" if len(nodes) > 1 else ""
    return f"non-finite {what} in round {after} at node {nodes[0]}{others}{of_seed}"
