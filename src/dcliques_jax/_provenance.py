"""Where numbers come from: what a `Result` keeps to be checked and repeated, and what a checkpoint is recognised by."""

import importlib
import platform
import subprocess
from typing import Any

import jax

from dcliques_jax._checks import checksum
from dcliques_jax._plans import Parts, Plan, Run

_PACKAGES = ("dcliques_jax", "jax", "jaxlib", "flax", "optax", "numpy")


def provenance(runs: list[Run], plan: Plan, parts: Parts, program: str) -> dict[str, Any]:
    """What determines the numbers of some runs, bit for bit. Plain values only."""
    graphs, data = [run.topology for run in runs], runs[0].data.dataset
    return {
        "topology": graphs[0].name,
        "topology_checksum": checksum(*(a for g in graphs for a in (g.edges, g.clique_ids, g.gradient_edges))),
        "num_nodes": graphs[0].num_nodes,
        "dataset": data.name,
        "dataset_checksum": data.checksum,
        "partition_checksum": checksum(*(a for run in runs for a in (run.data.indices, run.data.sizes))),
        "model": parts.model_name,
        "init": parts.init if isinstance(parts.init, str) else f"given, {checksum(*jax.tree.leaves(parts.init))}",
        "program": program,  # a checksum of the model, the algorithm and the loss as compiled
        **plan.asked,
        "batch_size": plan.batch_size,
        "rounds_per_epoch": plan.rounds_per_epoch,
        "eval_nodes": plan.eval_nodes,
        "eval_examples": plan.eval_examples,
        "seeds": [run.seed for run in runs],
        "device": jax.default_backend(),
        "versions": versions(),
    }


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
