"""Where numbers come from: what a `Result` keeps to be checked and repeated, and what a checkpoint is recognised by."""

import functools
import importlib
import platform
import re
import subprocess
import types
from typing import Any

import jax

from dcliques_jax._arrays import checksum
from dcliques_jax._engine.plan import Plan, Recipe, Run, Schedule
from dcliques_jax._mesh.transfer import is_key
from dcliques_jax.algorithms import Algorithm, Network
from dcliques_jax.results import State

_PACKAGES = ("dcliques_jax", "jax", "jaxlib", "flax", "optax", "numpy")
_COMPILERS = ("dcliques_jax", "jax", "jaxlib")  # may change the bits of one program; flax and optax only write it
# Cannot change the bits of a run that goes on: names of what has a checksum beside them, and when to evaluate.
_HARMLESS = (
    "topology",
    "dataset",
    "model",
    "algorithm",
    "loss",
    "init",
    "eval_every",
    "eval_nodes",
    "eval_examples",
    "versions",
)
_OPTAX_PLUMBING = ("chain", "with_extra_args_support")  # that build nothing of their own
_MEASURED = {"evaluated_nodes": "nodes", "evaluated_examples": "examples"}


def provenance(runs: list[Run], plan: Plan, schedule: Schedule, recipe: Recipe, program: str) -> dict[str, Any]:
    """What determines the numbers of some runs, bit for bit. Plain values only."""
    graphs, data = [run.topology for run in runs], runs[0].data.dataset
    return {
        "topology": graphs[0].name,
        "topology_checksum": checksum(*(a for g in graphs for a in (g.edges, g.clique_ids, g.gradient_edges))),
        "num_nodes": graphs[0].num_nodes,
        "dataset": data.name,
        "dataset_checksum": data.checksum,
        "partition_checksum": checksum(*(a for run in runs for a in (run.data.indices, run.data.sizes))),
        "model": recipe.model_name,
        "algorithm": described(recipe.algorithm),
        "loss": described(recipe.loss_fn),
        "init": recipe.init if isinstance(recipe.init, str) else f"given, {checksum(*_plain_leaves(recipe.init))}",
        "program": program,  # a checksum of the model, the algorithm and the loss as compiled
        **schedule.requested,
        "batch_size": plan.batch_size,
        "rounds_per_epoch": plan.rounds_per_epoch,
        "eval_nodes": plan.eval_nodes,
        "eval_examples": plan.eval_examples,
        "evaluate_on": plan.evaluate_on,
        "metrics": {name: "mean model" if m.of_mean_model else "nodes" for name, m in recipe.metrics.items()},
        "seeds": [run.seed for run in runs],
        "device": jax.default_backend(),
        "versions": versions(),
    }


def identity(
    about: dict[str, Any], runs: list[Run], plan: Plan, networks: list[Network], starts: list[State]
) -> dict[str, Any]:
    """What a checkpoint is recognised by: provenance, what is measured, the networks and the states before all rounds.

    Matrices, initial models and numbers that an optimiser keeps in its state are not part of the program.
    """
    return about | {
        "evaluated_nodes": checksum(*map(plan.nodes, runs)),
        "evaluated_examples": checksum(*map(plan.examples, runs)),
        "start": checksum(*_plain_leaves((networks, starts))),
    }


def _plain_leaves(tree: Any) -> list[Any]:
    return [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in jax.tree.leaves(tree)]


def differences(was: dict[str, Any], now: dict[str, Any]) -> str:
    """How a run differs from that of a checkpoint, and what to do; empty if it goes on to the same bits."""
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
    """What a function was built with, in words: the names of those that built it, and the plain values they took.

    `within` are the ids of functions that it was reached through: one may close over itself.

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
    """Whether a function's cell has no value that says something."""
    try:
        return cell.cell_contents is None
    except ValueError:  # nothing is assigned to it yet
        return True


def versions() -> dict[str, str]:
    """Of the packages that determine the numbers."""
    return {name: importlib.import_module(name).__version__ for name in _PACKAGES}


def surroundings() -> dict[str, Any]:
    """What does not determine the numbers, but tells where they were made."""
    return {"git": _git_commit(), "python": platform.python_version(), "machine": platform.machine()}


def _git_commit() -> str | None:
    """The commit that the current folder is at, if it is one of a git repository, and whether files were changed."""
    try:
        told = [
            subprocess.run(["git", *command], capture_output=True, text=True, timeout=5, check=True).stdout.strip()
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.SubprocessError):
        return None
    return told[0] + (", with changes" if told[1] else "")
