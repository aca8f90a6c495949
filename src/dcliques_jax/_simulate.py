"""The entry functions `simulate` and `prepare`."""

import dataclasses
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from dcliques_jax import _checks
from dcliques_jax._engine import fit, interrupts, layout, loop
from dcliques_jax._engine.plan import Run, Schedule, make_schedule
from dcliques_jax._engine.setup import Setup, make_setup
from dcliques_jax._engine.simulation import Simulation
from dcliques_jax._models.contract import parts_of
from dcliques_jax._store.checkpoints import Checkpoints
from dcliques_jax._store.provenance import described, identity, provenance, surroundings
from dcliques_jax.algorithms import Algorithm, Traffic
from dcliques_jax.datasets import Dataset
from dcliques_jax.faults import Fault
from dcliques_jax.partitions import PartitionedDataset
from dcliques_jax.results import Record, Result, State
from dcliques_jax.topologies import Topology


def simulate(
    topology: Topology | Sequence[Topology],
    dataset: PartitionedDataset | Dataset | Sequence[PartitionedDataset],
    *,
    model: Any = None,
    algorithm: Algorithm | Callable[..., Algorithm] | None = None,
    loss_fn: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    epochs: int | None = None,
    rounds: int | None = None,
    batch_size: int | None = None,
    init: Any = "shared",
    eval_every: int | Sequence[int] = 1,
    eval_nodes: int | Sequence[int] | None = None,
    eval_examples: int | None = None,
    evaluate_on: Literal["test", "validation"] = "test",
    faults: Fault | Sequence[Fault] | None = None,
    metrics: Mapping[str, Any] | None = None,
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    on_nonfinite: Literal["raise", "warn"] = "raise",
    on_evaluation: Callable[[Record], Any] | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    extend: int = 0,
    sweep: Mapping[str, Sequence[float]] | None = None,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    progress: bool = True,
) -> Result:
    """Trains one model per node of a topology and evaluates the models.

    A run is a pure function of its arguments: the same arguments give the same bits on the same kind of device.

    Ctrl-C stops a run within a second or two, or, if that takes longer, after the current round, evaluation or
    compilation. The run saves a checkpoint if `checkpoint_dir` is set, and returns the result so far with a warning and
    `interrupted` set. A second Ctrl-C raises `KeyboardInterrupt` immediately.

    Args:
      topology: the graph of nodes that exchange models.
      dataset: the examples of each node, from `partitions`. A plain `Dataset` is split IID over the nodes.
      model: a flax module or a pair of functions `(init, apply)`, also with dropout or batch statistics, see the module
        `models`. Default: `models.logistic_regression`.
      algorithm: what happens in a round. Default: `algorithms.dsgd()`, with learning rate 0.1 and, if the topology has
        cliques, Clique Averaging.
      loss_fn: the loss to minimise, a function of the outputs and labels of a batch that returns one loss per example,
        `[batch]`; for sequences one per label, `[batch, length]`. Default: `metrics.cross_entropy`, or, for real
        numbers, `metrics.squared_error`.
      epochs: number of epochs to train. An epoch is one pass of every node over its examples. Default: 10.
      rounds: number of rounds to train. Pass either `epochs` or `rounds`, not both.
      batch_size: number of examples per node and round. If nodes differ in size, the largest node takes `batch_size`
        examples and the others proportionally fewer. Default: 128 / 500 of the largest node, as in the paper's MNIST
        runs.
      init: the initial models: `"shared"` (all nodes start from one random model), `"averaged"` (all nodes start from
        the mean of one random model per node) or `"independent"` (each node starts from its own random model); the
        parameters of one node as a pytree; the stacked parameters of all nodes; or the `state` of a `Result`. A state
        continues its run and random streams, also on another topology with the same number of nodes; `epochs` and
        `rounds` then count the additional training.
      eval_every: number of epochs (rounds, if `rounds` is given) between evaluations, or a list of the epochs (rounds)
        after which to evaluate. The start and the end are always evaluated.
      eval_nodes: number of nodes to evaluate, drawn once from the seed, or a list of nodes. Default: all.
      eval_examples: number of examples to evaluate on, drawn once from the seed. Default: all.
      evaluate_on: `"test"`, or `"validation"` if the data set has validation examples.
      faults: what goes wrong in rounds: one of `dcliques_jax.faults` or a list. Default: nothing.
      metrics: additional metrics by name: functions `(params, inputs, labels)` of one node's model, see the module
        `metrics`. `history.extra` holds their values.
      augment: function `(key, inputs) -> inputs` of one node's batch that changes training inputs at random in every
        round, such as one of `dcliques_jax.augmentations`. Default: inputs stay as they are.
      on_nonfinite: what to do if a loss or a parameter is infinite or NaN: `"raise"` an error or `"warn"` once.
      on_evaluation: function that is called with a `results.Record` after every evaluation. The run stops if it returns
        `True`. A run that resumes from a checkpoint first repeats the calls for the earlier evaluations. If the seeds
        do not fit into memory together, only the first group of seeds can stop the run.
      checkpoint_dir: folder for checkpoints. A run saves at evaluations, and spends at most a twentieth of its time on
        it. The same call resumes from the last checkpoint and ends with the same bits as an uninterrupted run.
      extend: number of additional epochs (rounds, if `rounds` is given), to train longer from a finished checkpoint.
      sweep: values to try for arguments of the algorithm, by name. `algorithm` is then a function of these arguments,
        for example `lambda learning_rate: dsgd(optax.sgd(learning_rate))`, with `sweep={"learning_rate": [0.03, 0.1]}`.
        All combinations are simulated together, in one program that is compiled once whatever the values. Measurements
        have the axes `[sweep..., seeds, t, nodes]`; `Result.best` chooses a combination. A combination that diverges
        warns. Each equals a run of its own up to rounding.
      seed: seed of all that a run draws: initial models, the order of examples, augmentation, dropout, faults, drawn
        graphs, draws of algorithms, and the evaluated subsets.
      seeds: list of seeds, one run per seed. Runs are simulated together if they fit into memory. All measurements then
        have the seeds on their first axis. `topology` and `dataset` may be lists with one entry per seed and the same
        number of nodes. `batch_size` is that of the largest node of all seeds.
      mesh: devices to shard the nodes over, `jax.make_mesh((k,), ("nodes",))`. Each clique stays on one device.
      progress: whether to show a progress bar in terminals and notebooks.

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
    kept = "" if checkpoints.directory is None else f"; repeat the call to continue from {checkpoints.directory}"
    last = schedule.evaluated[-1]
    told = f"interrupted after round {result.provenance['rounds_run']} of {last}: returning the result so far"
    _checks.warn(told + kept, RuntimeWarning)
    return dataclasses.replace(result, interrupted=True)


def prepare(
    topology: Topology | Sequence[Topology],
    dataset: PartitionedDataset | Dataset | Sequence[PartitionedDataset],
    *,
    model: Any = None,
    algorithm: Algorithm | Callable[..., Algorithm] | None = None,
    loss_fn: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    batch_size: int | None = None,
    init: Any = "shared",
    eval_nodes: int | Sequence[int] | None = None,
    eval_examples: int | None = None,
    evaluate_on: Literal["test", "validation"] = "test",
    faults: Fault | Sequence[Fault] | None = None,
    metrics: Mapping[str, Any] | None = None,
    augment: Callable[[jax.Array, jax.Array], jax.Array] | None = None,
    on_nonfinite: Literal["raise", "warn"] = "raise",
    sweep: Mapping[str, Sequence[float]] | None = None,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> Simulation:
    """Prepares a `Simulation`, which the caller advances and evaluates step by step.

    `simulate` is a loop over such a simulation. The arguments are those of `simulate`, without those that say how long
    to run and when to evaluate. All seeds run together.

    >>> from dcliques_jax import datasets, partitions, topologies
    >>> data = partitions.shards(datasets.synthetic(), 10)
    >>> simulation = prepare(topologies.ring(10), data)
    >>> simulation.run(3)
    >>> simulation.round, simulation.evaluate().accuracy.shape
    (3, (10,))
    """
    return make_setup(**locals()).simulation()


def refusal(topology: Any, dataset: Any, **arguments: Any) -> str | None:
    """Returns why the algorithm does not allow a topology or faults, or None if it does. Nothing is compiled."""
    given = inspect.signature(prepare).bind(topology, dataset, **arguments)
    given.apply_defaults()
    try:
        make_setup(**given.arguments)
    except fit.RefusedError as error:
        return str(error)
    return None


def _by_turns(
    setup: Setup, schedule: Schedule, callbacks: loop.Callbacks, checkpoints: Checkpoints
) -> list[loop.Outcome]:
    """Simulates all runs, in groups that fit into memory."""
    outcomes: list[loop.Outcome] = []
    with checkpoints.opened(runs_at_once=setup.runs_at_once()) as at_once:
        for start in range(0, len(setup.runs), at_once):
            simulation = setup.simulation(start, start + at_once)
            known = functools.partial(_identity, setup, schedule, simulation, slice(start, start + at_once))
            outcome = loop.train(simulation, schedule, callbacks, checkpoints.part(start), known)
            del simulation, known  # free the devices for the next group
            if outcome.interrupted and outcomes:
                return [*outcomes[:-1], outcomes[-1]._replace(interrupted=True)]  # the earlier groups are finished
            outcomes.append(outcome)
            if outcome.interrupted:
                break
            # Later groups are evaluated after the same rounds as the first, and stop where it stopped.
            schedule = schedule._replace(evaluated=[record.round for record in outcomes[0].records])
            callbacks.may_stop = False
    return outcomes


def _identity(setup: Setup, schedule: Schedule, simulation: Simulation, part: slice) -> dict[str, Any]:
    """Returns the values that identify a checkpoint of some of the runs."""
    runs, plan = setup.runs[part], setup.plan
    about = provenance(runs, plan, schedule, setup.recipe, simulation.checksum)
    about["metric_checksums"] = fit.metric_checksums(runs[0], plan, setup.recipe, parts_of(*setup.one_node))
    return identity(about, runs, plan, setup.networks[part], simulation.starts)


def _traffic(setup: Setup, runs: list[Run]) -> list[Traffic]:
    """Returns the traffic of each run without faults; nothing if the algorithm does not say."""
    told = [setup.recipe.sends(run) for run in runs]
    each = zip(told, setup.networks, strict=False)
    return [] if None in told else [sends(network, setup.one_node) for sends, network in each if sends is not None]


def _result(setup: Setup, schedule: Schedule, outcomes: list[loop.Outcome]) -> Result:
    """Combines all runs into a result, without the axis of runs unless the user passed `seeds`."""
    axes, started = setup.axes, sum(len(outcome.state.round) for outcome in outcomes)
    if started < len(setup.runs):  # interrupted: keep all runs of some values of the first argument, or a list of runs
        row = math.prod(axes[1:])
        axes = (started // row, *axes[1:]) if started >= row else (started,)
    runs = setup.runs[: math.prod(axes)]

    def of_user(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[: len(runs)].reshape((*axes, *leaf.shape[1:])), tree)

    history = loop.make_history(outcomes, runs, setup.plan, of_user)
    states = [jax.tree.map(lambda leaf, r=r: leaf[r], o.state) for o in outcomes for r in range(len(o.state.round))]
    state: State = of_user(outcomes[0].state if len(outcomes) == 1 else layout.stack_runs(states, np))
    about = provenance(runs, setup.plan, schedule, setup.recipe, outcomes[0].program) | surroundings()
    about |= {"rounds_run": int(np.max(state.round)), "memory_bytes": outcomes[0].memory}
    traffic = _traffic(setup, runs)
    if traffic:  # mean over nodes and runs
        about["messages_per_round"] = float(np.mean([sent.messages for sent in traffic]))
        about["bytes_per_round"] = float(np.mean([sent.bytes for sent in traffic]))
    if len(axes) < len(setup.axes):
        about["sweep"] = None
    elif runs[0].values:
        first = [run for run in runs if run.values == runs[0].values]
        about["seeds"] = [run.seed for run in first]
        about["algorithm"] = [described(setup.recipe.algorithm_of(run)) for run in runs[:: len(first)]]
        about["sweep"] = {name: list(dict.fromkeys(run.values[name] for run in runs)) for name in runs[0].values}
    graphs = [run.topology for run in runs[: len(about["seeds"])]]
    same = all(graph is graphs[0] for graph in graphs)
    graph = graphs[0] if same else graphs
    return Result(graph, history, state.params, state, about, traffic=traffic, model_state=state.model)
