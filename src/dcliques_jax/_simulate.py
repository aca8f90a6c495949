"""The entry function, and the loop from one evaluation to the next."""

import functools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from dcliques_jax import (
    _checks,
    _devices,
    _executables,
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


class Watch(NamedTuple):
    """What happens at an evaluation."""

    on_evaluation: Callable[[Record], Any]
    on_nonfinite: str
    progress: bool
    one_run: bool  # whether the user knows of no axis of runs
    may_stop: bool = True


class Outcome(NamedTuple):
    """What runs that were simulated at once leave behind, runs first."""

    state: SimulationState  # with nodes in the order of the topology
    records: list[Record]
    program: str  # a checksum of the compiled program
    memory: int  # bytes of device memory that rounds take at their peak


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
    eval_every: int = 1,
    eval_nodes: int | None = None,
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
      eval_every: epochs between evaluations, or rounds if `rounds` is given. The end is always evaluated.
      eval_nodes: evaluate that many nodes only, drawn once by the seed.
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
        axis. `topology` and `dataset` may be lists of equal shapes, one for each seed.
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
    for name, function in (("loss_fn", loss_fn), ("on_evaluation", on_evaluation)):
        if function is not None and not callable(function):
            raise ValueError(f"{name}={function!r} must be a function")
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
    needed = _memory.forecast(runs[0], parts, states[0])
    _memory.check(runs[0], needed, mesh)
    watch = Watch(on_evaluation or (lambda _: None), on_nonfinite, progress, one_run=seeds is None)
    checkpoints = Checkpoints(checkpoint_dir)
    fitting = max(
        1, _memory.available(mesh) // max(1, 2 * needed.total)
    )  # twice: when runs begin and end, they are copied
    fitting = _devices.of_first_process(fitting)  # all processes must do the same
    outcomes: list[Outcome] = []
    with checkpoints.opened(runs_at_once=min(len(runs), fitting)) as at_once:
        for start in range(0, len(runs), at_once):
            some = runs[start : start + at_once]
            outcome = _train(_layouts.make_layout(some, parts, mesh), plan, watch, checkpoints.part(start))
            # Move finished runs to the host to free device memory.
            outcomes.append(
                outcome if len(some) == len(runs) else outcome._replace(state=jax.device_get(outcome.state))
            )
            # All are evaluated when the first are. If those were told to stop, the others stop there, too.
            plan = plan.following([record.round for record in outcomes[0].records])
            watch = watch._replace(may_stop=False)
    return _result(runs, plan, parts, outcomes, one_run=seeds is None)


def _train(layout: Layout, plan: Plan, watch: Watch, checkpoints: Checkpoints) -> Outcome:
    """Simulates some runs at once."""
    runs, parts = layout.runs, layout.parts
    starts = _layouts.start(layout)
    weights = [_devices.weights_in(state) for state in starts]
    lowered = _layouts.lower_on_one_device(layout, plan, starts)
    about = identity(provenance(runs, plan, parts, lowered.checksum), runs, plan, starts)
    starts, records = checkpoints.restore(about, starts, plan)
    rounds = _layouts.prepare(layout, plan, starts, lowered)
    state, evaluated = rounds.state, _layouts.make_evaluated(layout, plan)
    evaluate = _evaluation(layout, plan, rounds, evaluated)
    memory = rounds.memory() if len(plan.evaluated) > 1 else 0
    plan = plan.after([record.round for record in records])
    # What was restored is told again, so that a callback that counts or stops does what it did before.
    stopped = [_told(watch, record) for record in records][-1:] == [True]
    losses = counts = np.zeros((len(runs), 0, layout.num_places))  # of the rounds since the last evaluation
    warned = False
    with _progress_bar(runs, plan, watch) as bar:
        bar.update(records[-1].round if records else 0)
        if memory and not bar.disable:
            bar.write(f"{bar.desc}: a round takes {memory / 1e6:,.0f} MB of memory", file=sys.stderr)
        for index in range(len(records), len(plan.evaluated)):
            if stopped:
                break
            start, stop = plan.evaluated[max(index - 1, 0)], plan.evaluated[index]
            if stop > start:
                state, (losses, counts) = rounds.run(state, stop - start)
            evaluation, losses, counts = jax.device_get((evaluate(state.params), losses, counts))
            losses, counts = (_picked(values, layout.places)[:, : stop - start] for values in (losses, counts))
            evaluation = evaluation._replace(
                accuracy=_picked(evaluation.accuracy, evaluated.found),
                loss=_picked(evaluation.loss, evaluated.found),
                finite=_picked(evaluation.finite, layout.places),
                nodes_right=evaluation.nodes_right.reshape(len(runs), -1)[:, : plan.examples(runs[0]).size],
            )
            trouble = _find_trouble(runs, plan, stop, losses, evaluation)
            if trouble and watch.on_nonfinite == "raise":
                raise FloatingPointError(f"{trouble}. Lower the learning rate, or pass on_nonfinite='warn' to go on.")
            if trouble and not warned:
                warnings.warn(trouble, RuntimeWarning, stacklevel=3)
                warned = True
            records.append(_record(plan, stop, evaluation, losses, counts))
            if checkpoints.due():
                checkpoints.save(_layouts.in_topology_order(layout, state, weights), records)
            accuracy = evaluation.accuracy
            shown = f"{accuracy.min():.3f} / {accuracy.mean():.3f} / {accuracy.max():.3f}"
            bar.set_postfix({"accuracy": shown}, refresh=False)
            bar.update(stop - start)
            stopped = _told(watch, records[-1])
    state = _layouts.in_topology_order(layout, state, weights)
    checkpoints.save(state, records)
    return Outcome(state, records, lowered.checksum, memory)


def _picked(values: np.ndarray, found: np.ndarray) -> np.ndarray:
    """What was measured, `[runs, .., places]`, of the nodes that are found at some places `[runs, nodes]`."""
    return np.stack([run[..., places] for run, places in zip(values, found, strict=True)])


def _progress_bar(runs: list[Run], plan: Plan, watch: Watch) -> Any:
    """A bar in terminals and notebooks; none where nobody watches."""
    with warnings.catch_warnings(action="ignore"):  # a notebook without ipywidgets gets a bar of text, and no lecture
        from tqdm.auto import tqdm

    name = runs[0].topology.name + ("" if len(runs) == 1 else f", {len(runs)} seeds")
    seen = (sys.stderr.isatty() or "ipykernel" in sys.modules) and "PYTEST_CURRENT_TEST" not in os.environ
    seen = seen and jax.process_index() == 0
    return tqdm(total=plan.evaluated[-1], unit="round", desc=name, disable=not (watch.progress and seen))


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


def _record(plan: Plan, last: int, evaluation: Evaluation, losses: np.ndarray, counts: np.ndarray) -> Record:
    accuracy, loss, *of_all, _ = evaluation
    train_loss = np.stack([_mean_over_examples(*run) for run in zip(losses, counts, strict=True)])
    return Record(last, last / plan.rounds_per_epoch, accuracy, loss, train_loss, *of_all)


def _told(watch: Watch, record: Record) -> bool:
    """Tells the user's callback; whether it wants to stop, and may."""
    number, epoch, *arrays = record
    answer = watch.on_evaluation(Record(number, epoch, *(array[0] if watch.one_run else array for array in arrays)))
    return watch.may_stop and isinstance(answer, (bool, np.bool_)) and bool(answer)


def _mean_over_examples(losses: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Mean loss of each node since the last evaluation, `[nodes]`; NaN where it saw no example."""
    seen = counts.sum(axis=0).astype(np.float64)
    return np.divide((losses * counts).sum(axis=0), seen, out=np.full(len(seen), np.nan), where=seen > 0)


def _find_trouble(runs: list[Run], plan: Plan, last: int, losses: np.ndarray, evaluation: Evaluation) -> str | None:
    """Where the first infinite or NaN value appeared, if any did; `losses` are those of the rounds up to `last`."""
    for number, run in enumerate(runs):
        of_seed = "" if len(runs) == 1 else f" of seed {run.seed}"
        bad, finite, loss = ~np.isfinite(losses[number]), evaluation.finite[number], evaluation.loss[number]
        if bad.any():
            row = int(bad.any(axis=1).argmax())
            return _place("training loss", last - len(bad) + row + 1, np.flatnonzero(bad[row]), of_seed)
        if not finite.all():
            return _place("parameters", last, np.flatnonzero(~finite), of_seed)
        if not np.isfinite(loss).all():
            return _place("test loss", last, plan.nodes(run)[~np.isfinite(loss)], of_seed)
    return None


def _place(what: str, after: int, nodes: np.ndarray, of_seed: str) -> str:
    others = f" and {len(nodes) - 1} others" if len(nodes) > 1 else ""
    return f"non-finite {what} in round {after} at node {nodes[0]}{others}{of_seed}"


def _result(runs: list[Run], plan: Plan, parts: Parts, outcomes: list[Outcome], *, one_run: bool) -> Result:
    """All runs together, without their axis if the user knows of none."""
    measured = {
        name: [np.stack([getattr(record, name) for record in outcome.records], axis=1) for outcome in outcomes]
        for name in Record._fields[2:]
    }
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
    about |= {"rounds_run": int(rounds[-1]), "memory_bytes": outcomes[0].memory}
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
