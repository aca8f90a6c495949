"""Runs in a folder. Finished runs are reused, interrupted runs continue where they stopped."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dcliques_jax import _arrays, _checks, cliques
from dcliques_jax._simulate import prepare
from dcliques_jax._store import files
from dcliques_jax._store.provenance import surroundings, versions
from dcliques_jax._studies import kept
from dcliques_jax.datasets import Dataset
from dcliques_jax.paper.settings import CLIQUE_SIZE, TASKS, Setting
from dcliques_jax.results import Result


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
            self._datasets[task] = TASKS[task].load()
        return self._datasets[task]

    def folder(self, part: Setting | SkewStudy) -> pathlib.Path:
        """The folder of a part. Parts that differ in anything have different folders."""
        wanted = self.wanted(part)
        return self.out / "runs" / f"{part.name}-{_arrays.checksum(json.dumps(wanted, sort_keys=True).encode())[:8]}"

    def wanted(self, part: Setting | SkewStudy) -> dict[str, Any]:
        """Everything that determines a part, as plain values."""
        if isinstance(part, SkewStudy):
            return {**part._asdict(), "experiments": self.scale.experiments}
        length = {"epochs": self.scale.epochs[part.task], "eval_every": self._eval_every(part)}
        examples = (self.scale.eval_examples or {}).get(part.task)
        evaluated = {"eval_nodes": self._eval_nodes(part), "eval_examples": examples}
        return {
            **part._asdict(),
            "batch_size": part.batch_size,
            **length,
            **evaluated,
            "seeds": self.seeds,
            "init": self.init,
        }

    def found(self, part: Setting | SkewStudy) -> Any:
        """Loads what was measured: a `Result` of a setting, skews `[experiments, steps]` of a study, or None."""
        if isinstance(part, Setting):
            return kept.found(self.folder(part))
        path = self.folder(part) / "measured.npz"
        if not path.exists():
            return None
        try:
            return files.read_arrays(path)["skew"]
        except Exception as error:  # NumPy and zipfile raise many errors for other files
            raise ValueError(f"{path} is corrupt ({error}): remove it to measure again") from error

    def measure(self, part: Setting | SkewStudy) -> Any:
        """Returns what was measured. Runs the part if that is not done."""
        found = self.found(part)
        if isinstance(part, SkewStudy):
            return self._study(part) if found is None else found
        epochs = self.scale.epochs[part.task]
        last = epochs if self.until is None else min(epochs, self.until)
        folder = self.folder(part)
        if found is not None:
            self._check_origin(found, part, folder)
            if found.history.epoch[-1] >= last:
                return found
        if kept.is_unfinished(folder) and not self.resume:
            raise ValueError(f"{folder} holds an unfinished run: continue it with --resume, or choose another --out")
        return self._train(part, last, 0.0 if found is None else found.provenance["seconds"])

    def _check_origin(self, found: Result, setting: Setting, folder: pathlib.Path) -> None:
        """Raises a `ValueError` if results come from other data or another version."""
        ours = {"dataset_checksum": self.dataset(setting.task).checksum, "version": versions()["dcliques_jax"]}
        theirs = {**found.provenance, "version": found.provenance["versions"]["dcliques_jax"]}
        for name, value in ours.items():
            if theirs[name] != value:
                raise ValueError(
                    f"{folder} holds results of another run: {name} was {theirs[name]} and is {value}; choose another "
                    "--out"
                )

    def _study(self, study: SkewStudy) -> np.ndarray:
        nodes = Setting(study.task)
        skews = [
            cliques.skew_trajectory(
                nodes.data(self.dataset(study.task), seed).label_distribution, CLIQUE_SIZE, seed=seed
            )
            for seed in range(self.scale.experiments)
        ]
        folder = self.folder(study)
        folder.mkdir(parents=True, exist_ok=True)
        files.write_arrays(folder / "measured.npz", {"skew": np.stack(skews)})
        return np.stack(skews)

    def _train(self, setting: Setting, last: int, seconds_before: float) -> Result:
        """Trains up to an epoch. All seeds share one program."""
        dataset, wanted, folder = self.dataset(setting.task), self.wanted(setting), self.folder(setting)
        data = [setting.data(dataset, seed) for seed in self.seeds]
        graphs = [setting.graph(d.label_distribution, seed) for d, seed in zip(data, self.seeds, strict=True)]
        model = TASKS[setting.task].model(dataset.num_classes)
        trained = {"model": model, "algorithm": setting.algorithm(), "batch_size": wanted["batch_size"]}
        trained["on_nonfinite"] = "warn"  # divergence is a result, too
        result, seconds = kept.trained(
            folder,
            graphs,
            data,
            **trained,
            **{name: wanted[name] for name in ("epochs", "eval_every", "eval_nodes", "eval_examples")},
            init=self.init,
            seeds=self.seeds,
            on_evaluation=lambda record: record.epoch >= last,
            progress=self.progress,
        )
        finished = result.history.epoch[-1] >= wanted["epochs"]
        if finished:
            # Evaluate the last models on all test examples. Seeds are the first axis.
            final = prepare(graphs, data, **trained, init=result.state, seeds=self.seeds).evaluate()
            measured = {name: getattr(final, name) for name in ("accuracy", "mean_model_accuracy", "nodes_right")}
            files.write_arrays(folder / "final.npz", measured)
        about = {"setting": setting.name, "seconds": round(seconds_before + seconds, 1)}
        return kept.keep(folder, result, finished=finished, **about)

    def _eval_every(self, setting: Setting) -> int:
        if self.scale.eval_every is not None:
            return self.scale.eval_every
        return 1 if setting.num_nodes <= 100 else 5

    def _eval_nodes(self, setting: Setting) -> int | None:
        most = self.scale.eval_nodes
        return None if most is None or most >= setting.num_nodes else most

    def described(self) -> dict[str, Any]:
        """The arguments, as plain values."""
        arguments = {"scale": self.scale._asdict(), "seeds": len(self.seeds), "first_seed": self.seeds[0]}
        arguments |= {"init": self.init, "until": self.until}
        return {**arguments, "versions": versions(), **surroundings()}
