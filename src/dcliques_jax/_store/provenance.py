"""Provenance of results, to check and repeat runs, and the identity of checkpoints."""

import functools
import importlib
import platform
import re
import subprocess
import types
from typing import Any

import jax
import numpy as np

from dcliques_jax._arrays import checksum
from dcliques_jax._engine.plan import Plan, Recipe, Run, Schedule
from dcliques_jax._mesh.transfer import is_key
from dcliques_jax.algorithms import Algorithm, Network
from dcliques_jax.partitions import PartitionedDataset
from dcliques_jax.results import State
from dcliques_jax.topologies import Topology

_PACKAGES = ("dcliques_jax", "jax", "jaxlib", "flax", "optax", "numpy")
_COMPILERS = ("dcliques_jax", "jax", "jaxlib")  # may change the bits of a program; flax and optax only build it
# Do not change the bits of a continued run: names of parts that have checksums, and when to evaluate.
_HARMLESS = (
    "topology",
    "dataset",
    "model",
    "algorithm",
    "loss",
    "augment",
    "init",
    "eval_every",
    "eval_nodes",
    "eval_examples",
    "versions",
)
_OPTAX_PLUMBING = ("chain", "with_extra_args_support")  # wrappers without parameters
_MEASURED = {"evaluated_nodes": "nodes", "evaluated_examples": "examples"}


def provenance(runs: list[Run], plan: Plan, schedule: Schedule, recipe: Recipe, program: str) -> dict[str, Any]:
    """Returns all that determines the bits of some runs, as plain values."""
    graphs, data = [run.topology for run in runs], runs[0].data.dataset
    return {
        "topology": graphs[0].name,
        "topology_checksum": checksum(*(a for g in graphs for a in _arrays_of(g))),
        "num_nodes": graphs[0].num_nodes,
        "dataset": data.name,
        "dataset_checksum": data.checksum,
        "partition_checksum": checksum(*(a for run in runs for a in _lists_of(run.data))),
        "sampling": plan.sampling,
        "model": recipe.model_name,
        "algorithm": described(recipe.algorithm_of(runs[0])),
        "loss": described(recipe.loss_fn),
        "augment": None if recipe.augment is None else described(recipe.augment),
        "faults": ", ".join(fault.name for fault in recipe.faults) or None,
        "init": recipe.init if isinstance(recipe.init, str) else f"given, {checksum(*_plain_leaves(recipe.init))}",
        "program": program,  # checksum of the model, the algorithm and the loss as compiled
        **schedule.requested,
        "batch_size": plan.batch_size,
        "rounds_per_epoch": plan.rounds_per_epoch,
        "eval_nodes": plan.eval_nodes,
        "eval_examples": plan.eval_examples,
        "evaluate_on": plan.evaluate_on,
        "metrics": {name: "mean model" if m.of_mean_model else "nodes" for name, m in recipe.metrics.items()},
        "seeds": [run.seed for run in runs],
        "sweep": [dict(run.values) for run in runs] if runs[0].values else None,
        "device": jax.default_backend(),
        "versions": versions(),
    }


def _lists_of(data: PartitionedDataset) -> list[Any]:
    """Returns which examples nodes hold and are tested on."""
    return [data.indices, data.sizes] + [data.test_indices] * (data.test_indices is not None)


def _arrays_of(topology: Topology) -> list[Any]:
    """Returns all that a topology consists of, as arrays."""
    found: list[Any] = [topology.edges, topology.clique_ids, topology.gradient_edges]
    if topology.arcs is not None:
        found.append(topology.arcs)
    for matrix in topology.matrices or ():
        found += [matrix.data, matrix.indices, matrix.indptr]
    return found + [np.array(True)] * topology.drawn


def identity(
    about: dict[str, Any], runs: list[Run], plan: Plan, networks: list[Network], starts: list[State]
) -> dict[str, Any]:
    """Returns the identity of a checkpoint: provenance, what is measured, the networks and the initial states.

    Matrices, initial models and numbers in the state of an optimiser are not part of the program.
    """
    return about | {
        "evaluated_nodes": checksum(*map(plan.nodes, runs)),
        "evaluated_examples": checksum(*map(plan.examples, runs)),
        "start": checksum(*_plain_leaves((networks, starts))),
    }


def _plain_leaves(tree: Any) -> list[Any]:
    return [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in jax.tree.leaves(tree)]


def differences(was: dict[str, Any], now: dict[str, Any]) -> str:
    """Describes how a run differs from a checkpoint and what to do; empty if the run continues with the same bits."""
    differing = {name: (was.get(name), now.get(name)) for name in {**was, **now} if was.get(name) != now.get(name)}
    compilers = [{name: of.get("versions", {}).get(name) for name in _COMPILERS} for of in (was, now)]
    deciding = differing.keys() - {*_HARMLESS}
    if not deciding and compilers[0] == compilers[1]:
        return ""
    for unit in ("epochs", "rounds"):
        before, after = differing.get(unit, (None, None))
        if deciding == {unit} and before is not None and after is not None and after > before:
            return f"{unit} was {before} and is {after}. To train longer, pass {unit}={before}, extend={after - before}"
    told = "; ".join(f"{name} was {before} and is {after}" for name, (before, after) in differing.items())
    why = [f"Its history is measured on other {what}. " for name, what in _MEASURED.items() if name in deciding]
    return f"{told}. {''.join(why)}Pass the same arguments, or another checkpoint_dir"


def described(value: Any, within: tuple[int, ...] = ()) -> str:
    """Describes a function by the names of the functions that built it and the plain values that they took.

    `within` holds the ids of the enclosing functions, since a function may close over itself.

    >>> import optax
    >>> from dcliques_jax import algorithms
    >>> described(algorithms.dsgd(optax.sgd(0.1, momentum=0.9)))
    'dsgd(optimizer=trace(decay=0.9, nesterov=False), learning_rate(0.1))'
    """
    if isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, functools.partial):
        return described(value.func, within)
    if isinstance(value, Algorithm):
        return described(value.step, within)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a transformation of optax
        return described(getattr(value, "update", value[0]), within)
    if isinstance(value, (tuple, list)):
        return ", ".join(text for text in (described(part, within) for part in value) if text)
    if not isinstance(value, types.FunctionType):
        return re.sub(r" at 0x[0-9a-f]+", "", getattr(value, "__qualname__", type(value).__name__))
    builder, inside, _ = value.__qualname__.partition(".<locals>")
    if not inside or id(value) in within:
        return builder
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    parts = {name: cell.cell_contents for name, cell in cells if not _is_blank(cell)}
    if builder == "scale" and isinstance(step := parts.get("step_size"), float) and step < 0:
        return f"learning_rate({-step:g})"
    texts = {name: described(part, (*within, id(value))) for name, part in parts.items()}
    if builder in _OPTAX_PLUMBING:
        return ", ".join(text for text in texts.values() if text not in ("", "identity()"))
    return f"{builder}({', '.join(f'{name}={text}' for name, text in texts.items())})"


def _is_blank(cell: Any) -> bool:
    """Returns whether a cell of a function is empty or None."""
    try:
        return cell.cell_contents is None
    except ValueError:  # not assigned yet
        return True


def versions() -> dict[str, str]:
    """Returns the versions of the packages that determine the numbers."""
    return {name: importlib.import_module(name).__version__ for name in _PACKAGES}


def surroundings() -> dict[str, Any]:
    """Returns where a run took place, which does not determine its numbers."""
    return {"git": _git_commit(), "python": platform.python_version(), "machine": platform.machine()}


def _git_commit() -> str | None:
    """Returns the git commit of the current folder and whether files have changed; None outside a repository."""
    try:
        told = [
            subprocess.run(["git", *command], capture_output=True, text=True, timeout=5, check=True).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return told[0] + (", with changes" if told[1] else "")
