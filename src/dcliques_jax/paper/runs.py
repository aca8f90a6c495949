"""Runs in a folder. Finished runs are reused, interrupted runs continue where they stopped."""

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dcliques_jax import _arrays, _checks, cliques, partitions
from dcliques_jax._store import files
from dcliques_jax._store.provenance import surroundings, versions
from dcliques_jax._studies import kept, names
from dcliques_jax._studies.file import Case, Study
from dcliques_jax._studies.runner import Runner
from dcliques_jax.datasets import Dataset
from dcliques_jax.paper.found import skews_of
from dcliques_jax.paper.settings import CLIQUE_SIZE, TASKS, Setting


class Scale(NamedTuple):
    """How long to train, and what to evaluate."""

    epochs: Mapping[str, int]  # by task
    eval_every: int | None = None  # epochs; None: 1, or 5 with more than 100 nodes
    eval_nodes: int | None = None  # None: all
    eval_examples: Mapping[str, int] | None = None  # by task; other tasks use all test examples
    experiments: int = 100  # runs of Greedy Swap in a `SkewStudy`


SCALES = {
    "full": Scale({"mnist": 100, "cifar10": 100}),
    # Long enough for every claim but those of epoch 100. Evaluating GN-LeNet on all examples would take longer still.
    "quick": Scale(
        {"mnist": 20, "cifar10": 10}, eval_every=2, eval_nodes=100, eval_examples={"cifar10": 1000}, experiments=10
    ),
}


class SkewStudy(NamedTuple):
    """The mean skew of the cliques of 100 nodes over the steps of Greedy Swap, in many experiments."""

    task: str

    @property
    def name(self) -> str:
        """A unique name that is fit for a file."""
        return f"skew-{self.task}"


class Runs:
    """The runs of one scale and some seeds in a folder; `run` explains the arguments."""

    def __init__(
        self,
        out: pathlib.Path,
        scale: Scale,
        seeds: int,
        *,
        first_seed: int = 0,
        init: str = "shared",
        until: int | None = None,
        resume: bool = False,
        datasets: Mapping[str, Dataset] | None = None,
        progress: bool = True,
    ) -> None:
        self.out, self.scale, self.until, self.resume, self.progress = out, scale, until, resume, progress
        first_seed = _checks.integer("first_seed", first_seed, 0)
        self.seeds = list(range(first_seed, first_seed + _checks.integer("seeds", seeds, 1)))
        self.init = init
        self._datasets = dict(datasets or {})
        counts = [("eval_every", scale.eval_every), ("eval_nodes", scale.eval_nodes)]
        counts += [("eval_examples", count) for count in (scale.eval_examples or {}).values()]
        for name, count in counts:
            if count is not None:
                _checks.integer(name, count, 1)

    def dataset(self, task: str) -> Dataset:
        """Loads the data set of a task, once."""
        if task not in self._datasets:
            self._datasets[task] = names.build("data", "", TASKS[task].data)
        return self._datasets[task]

    def folder(self, part: Setting | SkewStudy) -> pathlib.Path:
        """The folder of a part. Parts that differ in anything have different folders."""
        if isinstance(part, Setting):
            runner, case = self._runner(part)
            return runner.folder_of(case)
        wanted = json.dumps(self.wanted(part), sort_keys=True)
        return self.out / "runs" / f"{part.name}-{_arrays.checksum(wanted.encode())[:8]}"

    def wanted(self, part: Setting | SkewStudy) -> dict[str, Any]:
        """Everything that determines a part, as plain values."""
        if isinstance(part, SkewStudy):
            return {**part._asdict(), "experiments": self.scale.experiments}
        study = self._study_of(part)
        return {**study.common(), **study.axes}

    def found(self, part: Setting | SkewStudy) -> Any:
        """Loads what was measured: a `Result` of a setting, skews `[experiments, steps]` of a study, or None."""
        if isinstance(part, Setting):
            return kept.found(self.folder(part))
        path = self.folder(part) / "measured.npz"
        return skews_of(path) if path.exists() else None

    def measure(self, part: Setting | SkewStudy) -> Any:
        """Returns what was measured. Runs the part if that is not done."""
        if isinstance(part, SkewStudy):
            found = self.found(part)
            return self._skews(part) if found is None else found
        runner, case = self._runner(part)
        outcome = runner.outcome(case)
        if outcome.refused is not None:
            raise ValueError(f"{part.name}: {outcome.refused}")
        return outcome.result

    def _runner(self, setting: Setting) -> tuple[Runner, Case]:
        study = self._study_of(setting)
        how = {"until": self.until, "resume": self.resume, "progress": self.progress}
        dataset = functools.partial(self.dataset, setting.task)
        return Runner(study, self.out, dataset=dataset, keep_examples=True, **how), study.cases()[0]  # type: ignore[arg-type]

    def _study_of(self, setting: Setting) -> Study:
        every, nodes = self.scale.eval_every, self.scale.eval_nodes
        evaluated = {
            "eval_every": every if every is not None else 1 if setting.num_nodes <= 100 else 5,
            "eval_nodes": None if nodes is None or nodes >= setting.num_nodes else nodes,
            "eval_examples": (self.scale.eval_examples or {}).get(setting.task),
        }
        evaluated = {name: count for name, count in evaluated.items() if count is not None}
        return setting.study(self.seeds, epochs=self.scale.epochs[setting.task], init=self.init, **evaluated)

    def _skews(self, study: SkewStudy) -> np.ndarray:
        dataset, size = self.dataset(study.task), CLIQUE_SIZE
        seeds = range(self.scale.experiments)
        shares = [partitions.shards(dataset, 100, seed=seed).label_distribution for seed in seeds]
        skews = np.stack([cliques.skew_trajectory(p, size, seed=seed) for p, seed in zip(shares, seeds, strict=True)])
        folder = self.folder(study)
        folder.mkdir(parents=True, exist_ok=True)
        files.write_arrays(folder / "measured.npz", {"skew": skews})
        return skews

    def described(self) -> dict[str, Any]:
        """The arguments, as plain values."""
        arguments = {"scale": self.scale._asdict(), "seeds": len(self.seeds), "first_seed": self.seeds[0]}
        arguments |= {"init": self.init, "until": self.until}
        return {**arguments, "versions": versions(), **surroundings()}
