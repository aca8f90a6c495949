"""The entry function, and the loop from one evaluation to the next."""

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from dcliques_jax import (
    _checks,
    _devices,
    _executables,
    _interrupts,
    _layouts,
    _memory,
    _programs,
    algorithms,
    metrics,
    mixing,
    models,
)
from dcliques_jax._checkpoints import Checkpoints
from dcliques_jax._chunks import largest_result
from dcliques_jax._layouts import Layout, Rounds
from dcliques_jax._losses import Losses
from dcliques_jax._plans import Parts, Plan, Run, check_fit, make_plan, make_runs
from dcliques_jax._programs import Evaluation, Params, SimulationState
from dcliques_jax._provenance import identity, provenance, surroundings
from dcliques_jax.algorithms import Algorithm
from dcliques_jax.datasets import Dataset
from dcliques_jax.partitions import PartitionedDataset
from dcliques_jax.results import History, Record, Result
from dcliques_jax.topologies import Topology

_EVALUATION_BYTES = 2**24  # most memory for the largest intermediate result of evaluating one node
_EVALUATED_AT_ONCE = 1000  # most examples at a time
_PACE = 0.5  # seconds of rounds between two looks at Ctrl-C


@dataclasses.dataclass
class Watch:
    """What happens at an evaluation, and in between."""

    on_evaluation: Callable[[Record], Any]
    on_nonfinite: str
    progress: bool
    one_run: bool  # whether the user knows of no axis of runs
    interrupted: Callable[[], bool]  # whether Ctrl-C was pressed
    may_stop: bool = True
    warned: bool = False

    def complain(self, trouble: str | None) -> None:
        """Raises an error for non-finite numbers, or warns once."""
        if trouble and self.on_nonfinite == "raise":
            raise FloatingPointError(f"{trouble}. Lower the learning rate, or pass on_nonfinite='warn' to go on.")
        if trouble and not self.warned:
            warnings.warn(trouble, RuntimeWarning, stacklevel=5)
            self.warned = True


class Outcome(NamedTuple):
    """What runs that were simulated at once leave behind, runs first."""

    state: SimulationState  # with nodes in the order of the topology
    records: list[Record]
    program: str  # a checksum of the compiled program
    memory: int  # bytes of device memory that rounds take at their peak
    interrupted: bool  # whether Ctrl-C ended them


def simulate(
    topology: Topology | Sequence[Topology],
    dataset: PartitionedDataset | Dataset | Sequence[PartitionedDataset],
    *,
    model: Any = None,
    algorithm: Algorithm | None = None,
    loss_fn: Callable[[jax.Array, jax.Array], jax.Array] = metrics.cross_entropy,
    epochs: int | None = None,
    rounds: int | None = None,
    batch_size: int | None = None,
    init: Any = "shared",
    eval_every: int | Sequence[int] = 1,
    eval_nodes: int | Sequence[int] | None = None,
    eval_examples: int | None = None,
    on_nonfinite: Literal["raise", "warn"] = "raise",
    on_evaluation: Callable[[Record], Any] | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    extend: int = 0,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    progress: bool = True,
) -> Result:
    """Trains one model on every node of a topology and evaluates them all.

    A run is a pure function of its arguments: the same arguments give the same bits on the same kind of device.

    Ctrl-C stops a run within a second or two, or after the round, evaluation or compilation that takes longer: the
    checkpoint is saved if there is a folder, and the result so far is returned with a warning and `interrupted` set.
    Pressed again it raises `KeyboardInterrupt` at once.

    Args:
      topology: who talks to whom.
      dataset: which node holds what, from `partitions`. A plain `Dataset` is split IID over the nodes.
      model: a flax module or a pair of functions `(init, apply)`; `models.logistic_regression` by default.
      algorithm: one round; `algorithms.dsgd()` by default, with learning rate 0.1 and, where the topology has cliques,
        Clique Averaging.
      loss_fn: what is minimised: a function of the logits `[batch, classes]` and labels `[batch]` of a batch that
        returns the loss of each example, `[batch]`; cross-entropy by default.
      epochs: how long to train; 10 epochs by default. An epoch is one pass over the examples of every node.
      rounds: how long to train, counted in rounds instead.
      batch_size: examples that a node takes in a round. By default the share of the paper's MNIST runs, 128 of 500. If
        nodes differ in size it is that of the largest; the others take proportionally less.
      init: `"shared"` (all nodes start from one random model), `"averaged"` (all start from the mean of as many random
        models as there are nodes), `"independent"` (each starts from its own), or one node's parameters as a pytree.
      eval_every: epochs between evaluations, or rounds if `rounds` is given; or a list of the epochs (rounds) after
        which to evaluate. Start and end are always evaluated.
      eval_nodes: evaluate that many nodes only, drawn once by the seed; or a list of the nodes to evaluate.
      eval_examples: evaluate on that many test examples only, drawn once by the seed.
      on_nonfinite: what to do when a loss or a parameter is infinite or NaN: `"raise"` an error or `"warn"` once.
      on_evaluation: called with a `results.Record` after every evaluation, and of a run that goes on with those before,
        too; the run ends where it returns `True`. If not all seeds fit into memory, the first ones decide.
      checkpoint_dir: a folder to save all that is needed to go on into, at evaluations, but so seldom that it takes at
        most a twentieth of the time. Called again with the same arguments, the run goes on from there and ends with
        the same bits as if it had never stopped.
      extend: train that many epochs longer (rounds if `rounds` is given): what a finished checkpoint is continued with.
      seed: of the initial models, the order of examples and the subsets for evaluation.
      seeds: run once for every seed, all at once if memory allows. All that is measured then has the seeds on its first
        axis. `topology` and `dataset` may be lists of as many nodes, one for each seed. Where partitions differ in the
        size of their largest node, `batch_size` is that of the largest of all.
      mesh: devices to share the nodes out over, `jax.make_mesh((k,), ("nodes",))`; whole cliques stay on one device.
      progress: whether to show a progress bar, if there is a terminal or a notebook to show it in.

    >>> from dcliques_jax import datasets, partitions, topologies
    >>> data = partitions.shards(datasets.synthetic(), 10)
    >>> result = simulate(topologies.ring(10), data, epochs=2, progress=False)
    >>> result.history.round, result.history.accuracy.shape
    (array([0, 4, 8]), (3, 10))
    >>> simulate(topologies.ring(10), data, epochs=2, seeds=[0, 1, 2], progress=False).history.accuracy.shape
    (3, 3, 10)
    """
    _checks.choice("on_nonfinite", on_nonfinite, ("raise", "warn"))
    if mesh is not None:
        mesh = _devices.check_mesh(mesh)
    if not callable(loss_fn):
        raise ValueError(f"loss_fn={loss_fn!r} is not a function: leave it out for cross-entropy")
    if on_evaluation is not None and not callable(on_evaluation):
        raise ValueError(f"on_evaluation={on_evaluation!r} is not a function: pass one that takes a Record")
    runs = make_runs(topology, dataset, seed, seeds)
    plan = make_plan(
        runs,
        epochs=epochs,
        rounds=rounds,
        extend=extend,
        batch_size=batch_size,
        eval_every=eval_every,
        eval_nodes=eval_nodes,
        eval_examples=eval_examples,
    )
    if model is None:
        model = models.logistic_regression(runs[0].data.dataset.num_classes)
    algorithm = algorithms.dsgd() if algorithm is None else algorithm
    # JAX keeps traces, and with them constants, for as long as a function lives: these live no longer than the call.
    pair = models.Model(*map(functools.partial, models.as_model(model)))
    parts = Parts(pair, models.described(model), algorithm, functools.partial(loss_fn), init)
    with _executables.fresh_traces():
        states = [check_fit(run, parts) for run in runs]
    widest = max(runs, key=lambda run: run.data.indices.shape[1])
    needed = _memory.forecast(widest, parts, states[0])
    _memory.check(runs[0], needed, mesh)
    checkpoints = Checkpoints(checkpoint_dir)
    fitting = max(
        1, _memory.available(mesh) // max(1, 2 * needed.total)
    )  # twice: when runs begin and end, they are copied
    fitting = _devices.of_first_process(fitting)  # all processes must do the same
    outcomes: list[Outcome] = []
    with (
        checkpoints.opened(runs_at_once=min(len(runs), fitting)) as at_once,
        _interrupts.noticed() as interrupted,
    ):
        watch = Watch(on_evaluation or (lambda _: None), on_nonfinite, progress, seeds is None, interrupted)
        for start in range(0, len(runs), at_once):
            some = runs[start : start + at_once]
            outcome = _train(_layouts.make_layout(some, parts, mesh), plan, watch, checkpoints.part(start))
            if outcome.interrupted and outcomes:
                break  # those before are finished
            # Move finished runs to the host to free device memory.
            outcomes.append(
                outcome if len(some) == len(runs) else outcome._replace(state=jax.device_get(outcome.state))
            )
            if outcome.interrupted:
                break
            # All are evaluated when the first are. If those were told to stop, the others stop there, too.
            plan, watch.may_stop = plan.following([record.round for record in outcomes[0].records]), False
    result = _result(runs, plan, parts, outcomes, one_run=seeds is None)
    if not (outcome.interrupted or interrupted()):
        return result
    kept = "" if checkpoints.directory is None else f"; the same call goes on from {checkpoints.directory}"
    told = (
        f"interrupted after round {result.provenance['rounds_run']} of {plan.evaluated[-1]}: this is the result so far"
    )
    warnings.warn(told + kept, RuntimeWarning, stacklevel=2)
    return dataclasses.replace(result, interrupted=True)


def _train(layout: Layout, plan: Plan, watch: Watch, checkpoints: Checkpoints) -> Outcome:
    """Simulates some runs at once."""
    runs, parts = layout.runs, layout.parts
    starts = _layouts.start(layout, plan)
    weights = [_devices.weights_in(state) for state in starts]
    lowered = _layouts.lower_on_one_device(layout, plan, starts)
    about = identity(provenance(runs, plan, parts, lowered.checksum), runs, plan, starts)
    starts, records, losses = checkpoints.restore(about, starts, plan)
    plan = plan.after([record.round for record in records], losses.round)
    # What was restored is told again, so that a callback that counts or stops does what it did before.
    stopped = [_told(watch, record) for record in records][-1:] == [True]
    interrupted = False
    with _progress_bar(runs, plan, watch) as bar:
        bar.update(losses.round)
        with _compiling(bar):
            rounds = _layouts.prepare(layout, plan, starts, lowered)
            evaluated = _layouts.make_evaluated(layout, plan)
            evaluate = _evaluation(layout, plan, rounds, evaluated)
        state, chunks = rounds.state, _Chunks(rounds, layout, watch)
        memory = rounds.memory() if len(plan.evaluated) > 1 else 0
        if memory and not bar.disable:
            bar.write(f"{bar.desc}: a round takes {memory / 1e6:,.0f} MB of memory", file=sys.stderr)
        for stop in plan.evaluated[len(records) :]:
            if stopped:
                break
            state, losses = chunks.run(state, losses, stop, bar)
            interrupted = losses.round < stop
            if interrupted:
                break
            evaluation = jax.device_get(evaluate(state.params))
            evaluation = evaluation._replace(
                correct=_picked(evaluation.correct, evaluated.found),
                loss=_picked(evaluation.loss, evaluated.found),
                finite=_picked(evaluation.finite, layout.places),
                nodes_right=evaluation.nodes_right.reshape(len(runs), -1)[:, : plan.examples(runs[0]).size],
            )
            watch.complain(_nonfinite_models(runs, plan, stop, evaluation))
            records.append(_record(plan, evaluation, losses))
            losses = Losses.after(stop, len(runs), runs[0].data.num_nodes)
            if checkpoints.due():
                checkpoints.save(_layouts.in_topology_order(layout, state, weights), records, losses)
            accuracy = records[-1].accuracy
            shown = f"{accuracy.min():.3f} / {accuracy.mean():.3f} / {accuracy.max():.3f}"
            bar.set_postfix({"accuracy": shown})
            stopped = _told(watch, records[-1])
    state = _layouts.in_topology_order(layout, state, weights)
    checkpoints.save(state, records, losses)
    return Outcome(state, records, lowered.checksum, memory, interrupted)


class _Chunks:
    """Rounds, so many at a time that Ctrl-C is noticed soon: about half a second, or one that takes longer."""

    def __init__(self, rounds: Rounds, layout: Layout, watch: Watch) -> None:
        self._rounds, self._layout, self._watch = rounds, layout, watch
        self._pace = 1

    def run(self, state: SimulationState, losses: Losses, stop: int, bar: Any) -> tuple[SimulationState, Losses]:
        """Runs up to round `stop`, or until Ctrl-C is pressed."""
        while losses.round < stop:
            count = 0 if self._watch.interrupted() else min(stop - losses.round, self._pace)
            count = _devices.of_first_process(count)  # all processes must do the same
            if count == 0:
                break
            started = time.monotonic()
            state, measured = self._rounds.run(state, count)
            found, counts = (_picked(values[:, :count], self._layout.places) for values in jax.device_get(measured))
            seconds = max(time.monotonic() - started, 1e-9)
            self._watch.complain(_nonfinite_losses(self._layout.runs, losses.round, found))
            losses = losses.plus(found, counts)
            bar.update(count)
            self._pace = int(np.clip(_PACE * count / seconds, 1, self._rounds.most_rounds))
        return state, losses


def _picked(values: np.ndarray, found: np.ndarray) -> np.ndarray:
    """What was measured, `[runs, .., places]`, of the nodes that are found at some places `[runs, nodes]`."""
    return np.stack([run[..., places] for run, places in zip(values, found, strict=True)])


def _progress_bar(runs: list[Run], plan: Plan, watch: Watch) -> Any:
    """A bar in terminals and notebooks; none where nobody watches."""
    with warnings.catch_warnings(action="ignore"):  # a notebook without ipywidgets gets a bar of text, and no lecture
        from tqdm.auto import tqdm

    name = runs[0].topology.name + ("" if len(runs) == 1 else f", {len(runs)} seeds")
    terminal = getattr(sys.stderr, "isatty", lambda: False)()  # there may be no stderr at all
    seen = (terminal or "ipykernel" in sys.modules) and "PYTEST_CURRENT_TEST" not in os.environ
    seen = seen and jax.process_index() == 0
    return tqdm(total=plan.evaluated[-1], unit="round", desc=name, disable=not (watch.progress and seen))


@contextlib.contextmanager
def _compiling(bar: Any) -> Iterator[None]:
    """Says on a bar that is shown that programs are being compiled, and for how long."""
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
        bar.unpause()  # the time is that of rounds


def _evaluation(
    layout: Layout, plan: Plan, rounds: Rounds, evaluated: _layouts.Evaluated
) -> Callable[[Params], Evaluation]:
    """A function of all parameters. Test examples are evaluated in chunks that bound the memory of one node's model."""
    runs, parts, mesh = layout.runs, layout.parts, layout.mesh
    dataset, examples = runs[0].data.dataset, [plan.examples(run) for run in runs]
    needed, chosen = np.unique(np.stack(examples), return_inverse=True)
    numbers = _in_chunks(chosen.reshape(len(runs), -1), parts.model, rounds.state.params, dataset)
    arrays = (numbers, dataset.test_inputs[needed], dataset.test_labels[needed])
    test = tuple(_devices.put_everywhere(array, mesh) for array in arrays)
    others = (rounds.data.nodes, evaluated.places, *test)
    functions = (parts.model.apply, parts.loss_fn)
    lowered = _executables.lower(_programs.evaluate, functions, rounds.state.params, *others, mesh=mesh)
    program = lowered.compile(mesh)
    return lambda params: program(params, *others)


def _in_chunks(examples: np.ndarray, model: models.Model, params: Params, dataset: Dataset) -> np.ndarray:
    """Numbers of examples `[runs, count]` in chunks that bound the memory of one node, `[runs, chunks, chunk]`."""
    one_node = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[2:], leaf.dtype), params)
    with _executables.fresh_traces():
        largest = largest_result(model.apply, one_node, dataset.test_inputs[:1])
    chunks = -(-examples.shape[1] // int(np.clip(_EVALUATION_BYTES // largest, 1, _EVALUATED_AT_ONCE)))
    filled = np.pad(examples, ((0, 0), (0, -examples.shape[1] % chunks)), constant_values=-1)
    return filled.reshape(len(examples), chunks, -1).astype(np.int32)


def evaluate_on_all(model: models.Model, params: Params, dataset: Dataset) -> Evaluation:
    """Evaluates models `[runs, nodes, ...]` on all test examples."""
    num_runs, num_nodes = jax.tree.leaves(params)[0].shape[:2]
    count = len(dataset.test_labels)
    nodes, examples = (np.tile(np.arange(number, dtype=np.int32), (num_runs, 1)) for number in (num_nodes, count))
    chunks = _in_chunks(examples, model, params, dataset)
    arrays = (params, nodes, None, chunks, dataset.test_inputs, dataset.test_labels)
    lowered = _executables.lower(_programs.evaluate, (model.apply, metrics.cross_entropy), *arrays, mesh=None)
    found: Evaluation = jax.device_get(lowered.compile()(*arrays))
    return found._replace(nodes_right=found.nodes_right.reshape(num_runs, -1)[:, :count])


def _record(plan: Plan, evaluation: Evaluation, losses: Losses) -> Record:
    correct, loss, distance, mean_model_correct, nodes_right, _ = evaluation
    count = nodes_right.shape[1]
    measured = {
        # Divided here: XLA multiplies with a rounded inverse, and 97 of 97 would not be 1.
        "accuracy": (correct / count).astype(np.float32),
        "loss": _float(loss),
        "train_loss": losses.means(),
        "consensus_distance": _float(distance),
        "mean_model_accuracy": (mean_model_correct / count).astype(np.float32),
        "nodes_right": nodes_right,
    }
    return Record(losses.round, losses.round / plan.rounds_per_epoch, **measured)


def _float(values: np.ndarray) -> np.ndarray:
    """The values in a type that files know: those of models in half precision as float32."""
    return np.asarray(values, np.promote_types(values.dtype, np.float32) if values.dtype.kind == "f" else np.float32)


def _told(watch: Watch, record: Record) -> bool:
    """Tells the user's callback; whether it wants to stop, and may."""
    number, epoch, *arrays = record
    for array in arrays:
        array.flags.writeable = False  # a callback must not change history
    answer = watch.on_evaluation(Record(number, epoch, *(array[0] if watch.one_run else array for array in arrays)))
    # One truth value of any kind stops. Loggers return other things.
    arrays_too = isinstance(answer, (np.ndarray, jax.Array)) and answer.shape == () and answer.dtype == np.bool_
    return watch.may_stop and (arrays_too or isinstance(answer, (bool, np.bool_))) and bool(answer)


def _nonfinite_losses(runs: list[Run], before: int, losses: np.ndarray) -> str | None:
    """Where the first infinite or NaN loss appeared in the rounds after `before`, if any did."""
    for run, of_run in zip(runs, losses, strict=True):
        bad = ~np.isfinite(of_run)  # [rounds, nodes]
        if bad.any():
            row = int(bad.any(axis=1).argmax())
            return _place("training loss", before + row + 1, np.flatnonzero(bad[row]), _of_seed(runs, run))
    return None


def _nonfinite_models(runs: list[Run], plan: Plan, last: int, evaluation: Evaluation) -> str | None:
    """Which models have infinite or NaN parameters or test losses after round `last`, if any have."""
    for run, finite, loss in zip(runs, evaluation.finite, evaluation.loss, strict=True):
        if not finite.all():
            return _place("parameters", last, np.flatnonzero(~finite), _of_seed(runs, run))
        if not np.isfinite(loss).all():
            return _place("test loss", last, plan.nodes(run)[~np.isfinite(loss)], _of_seed(runs, run))
    return None


def _of_seed(runs: list[Run], run: Run) -> str:
    return "" if len(runs) == 1 else f" of seed {run.seed}"


def _place(what: str, after: int, nodes: np.ndarray, of_seed: str) -> str:
    others = f" and {len(nodes) - 1} others" if len(nodes) > 1 else ""
    return f"non-finite {what} in round {after} at node {nodes[0]}{others}{of_seed}"


def _result(runs: list[Run], plan: Plan, parts: Parts, outcomes: list[Outcome], *, one_run: bool) -> Result:
    """All runs together, without their axis if the user knows of none."""
    measured = {
        name: [np.stack([getattr(record, name) for record in outcome.records], axis=1) for outcome in outcomes]
        for name in Record._fields[2:]
    }
    runs = runs[: sum(len(outcome.records[0].accuracy) for outcome in outcomes)]  # those that were begun
    rounds = np.array([record.round for record in outcomes[0].records])
    history = History(
        round=rounds,
        epoch=rounds / plan.rounds_per_epoch,
        eval_nodes=_of_user(np.stack([plan.nodes(run) for run in runs]), one_run),
        eval_examples=_of_user(np.stack([plan.examples(run) for run in runs]), one_run),
        **{name: _of_user(np.concatenate(values), one_run) for name, values in measured.items()},
    )
    state = jax.tree.map(lambda leaf: _of_user(leaf, one_run), _of_all_runs(outcomes))
    about = provenance(runs, plan, parts, outcomes[0].program) | surroundings()
    about |= {"rounds_run": int(state.round.max()), "memory_bytes": outcomes[0].memory}
    graphs = [run.topology for run in runs]
    same = all(graph is graphs[0] for graph in graphs)
    return Result(graphs[0] if same else graphs, history, state.params, state, about)


def _of_all_runs(outcomes: list[Outcome]) -> SimulationState:
    """One state of runs that were simulated by turns, whose weights may have different forms."""
    if len(outcomes) == 1:
        return outcomes[0].state
    runs = [
        jax.tree.map(lambda leaf, run=run: leaf[run], outcome.state)
        for outcome in outcomes
        for run in range(len(outcome.records[0].accuracy))
    ]
    together: SimulationState = _layouts.stacked(mixing.alike(runs), np)
    return together


def _of_user(values: np.ndarray, one_run: bool) -> np.ndarray:
    return values[0] if one_run else values
