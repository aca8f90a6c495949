"""The entry functions: `simulate`, and `prepare` below it."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from dcliques_jax import _checks, metrics
from dcliques_jax._engine import fit, interrupts, layout, loop
from dcliques_jax._engine.plan import Schedule, make_schedule
from dcliques_jax._engine.setup import Setup, make_setup
from dcliques_jax._engine.simulation import Simulation
from dcliques_jax._store.checkpoints import Checkpoints
from dcliques_jax._store.provenance import identity, provenance, surroundings
from dcliques_jax.algorithms import Algorithm
from dcliques_jax.datasets import Dataset
from dcliques_jax.partitions import PartitionedDataset
from dcliques_jax.results import Record, Result, State
from dcliques_jax.topologies import Topology


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
    evaluate_on: Literal["test", "validation"] = "test",
    metrics: Mapping[str, Any] | None = None,
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
        models as there are nodes), `"independent"` (each starts from its own); or one node's parameters as a pytree, or
        the stacked parameters of all nodes; or the `state` of a `Result`, which goes on with its rounds and random
        streams, also on another topology of as many nodes. `epochs` and `rounds` then count what is trained further.
      eval_every: epochs between evaluations, or rounds if `rounds` is given; or a list of the epochs (rounds) after
        which to evaluate. Start and end are always evaluated.
      eval_nodes: evaluate that many nodes only, drawn once by the seed; or a list of the nodes to evaluate.
      eval_examples: evaluate on that many examples only, drawn once by the seed.
      evaluate_on: `"test"` examples, or those for `"validation"` where the data set has them.
      metrics: what else to measure, by name: functions `(params, inputs, labels)` of one node's model, see `metrics`.
        The results are in `history.extra`.
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
    arguments = locals()
    if on_evaluation is not None and not callable(on_evaluation):
        raise ValueError(f"on_evaluation={on_evaluation!r} is not a function: pass one that takes a Record")
    setup = make_setup(**{name: arguments[name] for name in inspect.signature(prepare).parameters})
    first = int(np.max(init.round)) if isinstance(init, State) else 0
    lengths: dict[str, Any] = {"epochs": epochs, "rounds": rounds, "extend": extend, "eval_every": eval_every}
    schedule = make_schedule(setup.plan, first, **lengths)
    checkpoints = Checkpoints(checkpoint_dir)
    with interrupts.noticed() as interrupted:
        callbacks = loop.Callbacks(on_evaluation or (lambda _: None), progress, interrupted)
        outcomes = _by_turns(setup, schedule, callbacks, checkpoints)
        result = _result(setup, schedule, outcomes)
        if not (outcomes[-1].interrupted or interrupted()):
            return result
    kept = "" if checkpoints.directory is None else f"; the same call goes on from {checkpoints.directory}"
    last = schedule.evaluated[-1]
    told = f"interrupted after round {result.provenance['rounds_run']} of {last}: this is the result so far"
    _checks.warn(told + kept, RuntimeWarning)
    return dataclasses.replace(result, interrupted=True)


def prepare(
    topology: Topology | Sequence[Topology],
    dataset: PartitionedDataset | Dataset | Sequence[PartitionedDataset],
    *,
    model: Any = None,
    algorithm: Algorithm | None = None,
    loss_fn: Callable[[jax.Array, jax.Array], jax.Array] = metrics.cross_entropy,
    batch_size: int | None = None,
    init: Any = "shared",
    eval_nodes: int | Sequence[int] | None = None,
    eval_examples: int | None = None,
    evaluate_on: Literal["test", "validation"] = "test",
    metrics: Mapping[str, Any] | None = None,
    on_nonfinite: Literal["raise", "warn"] = "raise",
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Simulation:
    """Prepares runs that go forward when they are told to: the level below `simulate`, which is the loop over it.

    The arguments are those of `simulate`; how long to run and when to evaluate is up to the caller. All seeds run at
    once.

    >>> from dcliques_jax import datasets, partitions, topologies
    >>> data = partitions.shards(datasets.synthetic(), 10)
    >>> simulation = prepare(topologies.ring(10), data)
    >>> simulation.run(3)
    >>> simulation.round, simulation.evaluate().accuracy.shape
    (3, (10,))
    """
    return make_setup(**locals()).simulation()


def _by_turns(
    setup: Setup, schedule: Schedule, callbacks: loop.Callbacks, checkpoints: Checkpoints
) -> list[loop.Outcome]:
    """Simulates all runs, as many at once as fit into memory."""
    outcomes: list[loop.Outcome] = []
    with checkpoints.opened(runs_at_once=setup.runs_at_once()) as at_once:
        for start in range(0, len(setup.runs), at_once):
            simulation = setup.simulation(start, start + at_once)
            known = functools.partial(_identity, setup, schedule, simulation, slice(start, start + at_once))
            outcome = loop.train(simulation, schedule, callbacks, checkpoints.part(start), known)
            if outcome.interrupted and outcomes:
                return [*outcomes[:-1], outcomes[-1]._replace(interrupted=True)]  # those before are finished
            outcomes.append(outcome)
            if outcome.interrupted:
                break
            # All are evaluated when the first are. If those were told to stop, the others stop there, too.
            schedule = schedule._replace(evaluated=[record.round for record in outcomes[0].records])
            callbacks.may_stop = False
    return outcomes


def _identity(setup: Setup, schedule: Schedule, simulation: Simulation, part: slice) -> dict[str, Any]:
    """What a checkpoint of some of the runs is recognised by."""
    runs, plan = setup.runs[part], setup.plan
    about = provenance(runs, plan, schedule, setup.recipe, simulation.checksum)
    about["metric_checksums"] = fit.metric_checksums(runs[0], plan, setup.recipe, setup.one_node)
    return identity(about, runs, plan, setup.networks[part], simulation.starts)


def _result(setup: Setup, schedule: Schedule, outcomes: list[loop.Outcome]) -> Result:
    """All runs together, without their axis if the user knows of none."""
    runs = setup.runs[: sum(len(outcome.state.round) for outcome in outcomes)]  # those that were begun

    def of_user(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[0], tree) if setup.one_run else tree

    history = loop.make_history(outcomes, runs, setup.plan, of_user)
    states = [jax.tree.map(lambda leaf, r=r: leaf[r], o.state) for o in outcomes for r in range(len(o.state.round))]
    state: State = of_user(outcomes[0].state if len(outcomes) == 1 else layout.stack_runs(states, np))
    about = provenance(runs, setup.plan, schedule, setup.recipe, outcomes[0].program) | surroundings()
    about |= {"rounds_run": int(np.max(state.round)), "memory_bytes": outcomes[0].memory}
    if (sends := setup.recipe.algorithm.traits.sends) is not None:  # per node, the mean over nodes and runs
        model_bytes = setup.needed.models // runs[0].data.num_nodes
        traffic = [sends(network, model_bytes) for network in setup.networks[: len(runs)]]
        about["messages_per_round"] = float(np.mean([sent.messages for sent in traffic]))
        about["bytes_per_round"] = float(np.mean([sent.bytes for sent in traffic]))
    graphs = [run.topology for run in runs]
    same = all(graph is graphs[0] for graph in graphs)
    return Result(graphs[0] if same else graphs, history, state.params, state, about)
