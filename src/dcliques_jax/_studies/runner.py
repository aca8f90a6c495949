"""Runs the cases of a study."""

import os
import pathlib
import sys
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dcliques_jax._simulate import prepare
from dcliques_jax._store import files
from dcliques_jax._studies import file, kept, names
from dcliques_jax._studies.file import Case, Study
from dcliques_jax.algorithms import Algorithm
from dcliques_jax.augmentations import compose
from dcliques_jax.results import Result
from dcliques_jax.schedules import rounds_per_epoch

COPY, REFUSED = "study.json", "refused.json"


class Outcome(NamedTuple):
    """What became of a case."""

    case: Case
    result: Result | None  # None if the case is not possible, or not run yet
    refused: str | None = None  # why it is not possible
    values: Mapping[str, float] = MappingProxyType({})  # the tuned values


def run(
    study: Study, out: str | os.PathLike[str], *, resume: bool = False, only: Iterable[str] = (), progress: bool = True
) -> list[Outcome]:
    """Runs the cases of a study that are not finished; returns the outcomes of all that were chosen."""
    from tqdm.auto import tqdm

    folder = pathlib.Path(out)
    chosen = _chosen(study, list(only))
    if (folder / COPY).exists() and not resume:
        raise ValueError(f"{folder} holds runs of a study: continue with --resume, or choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / COPY, {"study": study._asdict()})
    runner = _Runner(study, folder)
    outcomes = []
    with tqdm(chosen, unit="case", disable=not (progress and sys.stderr.isatty())) as bar:
        for case in bar:
            bar.set_description(case.name())
            outcomes.append(runner.outcome(case))
    return outcomes


def kept_outcomes(folder: pathlib.Path) -> list[Outcome]:
    """Loads the outcomes of all cases of a folder, also of those that were not run."""
    runner = _Runner(read_study(folder), folder)
    return [runner.kept(case) for case in runner.study.cases()]


def read_study(folder: pathlib.Path) -> Study:
    """Reads the study of a folder of results."""
    path = folder / COPY
    if not path.exists():
        raise ValueError(f"{folder} holds no study: run one with `python -m dcliques_jax run FILE --out {folder}`")
    try:
        return Study(**{"augment": []} | files.read_json(path)["study"])
    except TypeError as error:
        raise ValueError(f"{path} was written by another version of this library: {error}") from None


def _chosen(study: Study, only: list[str]) -> list[Case]:
    """Returns the cases with chosen labels. Sections in which nothing is chosen are not restricted."""
    known = {label for labels in study.axes.values() for label in labels}
    for label in only:
        if label not in known:
            raise ValueError(f"--only {label!r} is unknown: choose among {', '.join(sorted(known))}")
    wanted = {section: set(labels) & set(only) or set(labels) for section, labels in study.axes.items()}
    return [case for case in study.cases() if all(case.labels[section] in wanted[section] for section in wanted)]


class _Runner:
    """Builds, runs and keeps cases."""

    def __init__(self, study: Study, folder: pathlib.Path) -> None:
        self.study, self.folder = study, folder
        self._data: Any = None
        self._partitions: dict[tuple[str, int], Any] = {}

    def kept(self, case: Case) -> Outcome:
        """Loads what is known of a case."""
        folder = self.folder / "runs" / case.id(self.study)
        if (folder / REFUSED).exists():
            return Outcome(case, None, str(files.read_json(folder / REFUSED)["reason"]))
        result = kept.found(folder)
        return Outcome(case, result, None, {} if result is None else dict(result.provenance["tuned"]))

    def outcome(self, case: Case) -> Outcome:
        """Runs a case, unless that is done."""
        known = self.kept(case)
        if known.result is not None or known.refused is not None:
            return known
        folder = self.folder / "runs" / case.id(self.study)
        first = {name: grid[0] for name, grid in self.study.grids.items()}
        if (refused := self._refusal(case, first)) is not None:
            folder.mkdir(parents=True, exist_ok=True)
            files.write_json(folder / REFUSED, {"reason": refused})
            return Outcome(case, None, refused)
        values = self._tuned(case)
        swept = self._grids(case, "sweep")
        result = self._trained(case, folder, self.study.seeds, values, swept, faults=self._faults(case))
        return Outcome(case, self._keep(folder, case, *result, tuned=values), None, values)

    def _refusal(self, case: Case, values: dict[str, float]) -> str | None:
        """Returns why the algorithm does not allow this topology or these faults, before anything is compiled."""
        seed = self.study.seeds[0]
        arguments = self._arguments(case, [seed], self._algorithm(case, values, ()))
        graphs, data = arguments.pop("topology"), arguments.pop("dataset")
        try:
            prepare(graphs[0], data[0], **arguments, faults=self._faults(case), seed=seed)
        except ValueError as error:
            return str(error)
        return None

    def _tuned(self, case: Case) -> dict[str, float]:
        """Returns the best values of the grids to tune, measured without faults: cases with faults share them."""
        grids = self._grids(case, "tune")
        if not grids:
            return {}
        folder = self.folder / "tuning" / case.without("faults").id(self.study)
        result = kept.found(folder)
        if result is None:
            tune = dict(self.study.tune)
            seeds, metric = tune.pop("seeds"), tune.pop("metric")
            lengths = self.study.simulate | tune
            tune["eval_every"] = lengths.get("rounds") or lengths.get("epochs", 10)  # only the end counts
            swept, seconds = self._trained(case, folder, seeds, {}, grids, **tune)
            result = self._keep(folder, case, swept.best(metric), seconds)
        return {name: float(value) for name, value in result.provenance["sweep"].items()}

    def _trained(
        self,
        case: Case,
        folder: pathlib.Path,
        seeds: list[int],
        values: Mapping[str, float],
        sweep: Mapping[str, list[float]],
        **other: Any,
    ) -> tuple[Result, float]:
        """Simulates a case with values for some of the grids and a sweep over others."""
        lengths = self.study.simulate | {name: value for name, value in other.items() if name != "faults"}
        if "rounds" in other:
            lengths.pop("epochs", None)
        arguments = self._arguments(case, seeds, self._algorithm(case, values, tuple(sweep))) | lengths
        arguments |= {"faults": other.get("faults"), "sweep": sweep or None, "seeds": seeds}
        return kept.trained(folder, **arguments, on_nonfinite="warn", progress=False)

    def _keep(self, folder: pathlib.Path, case: Case, result: Result, seconds: float, **about: Any) -> Result:
        about |= {"seconds": round(seconds, 1), "case": case.labels}
        return kept.keep(folder, kept.without_examples(result), **about)

    def _arguments(self, case: Case, seeds: list[int], algorithm: Any) -> dict[str, Any]:
        """Builds what to simulate, with one topology and one partition per seed."""
        study, label, table = self.study, case.labels["topologies"], case.tables["topologies"]
        data = [self._partition(case, seed) for seed in seeds]
        given = [
            {"num_nodes": study.num_nodes, "label_distribution": each.label_distribution, "seed": seed}
            for each, seed in zip(data, seeds, strict=True)
        ]
        graphs = [names.build("topologies", label, table, **each) for each in given]
        model = names.build("models", "", study.model, num_classes=self._dataset().num_classes)
        metrics = {name: names.build("metrics", name, table, model=model) for name, table in study.metrics.items()}
        return {
            "topology": graphs,
            "dataset": data,
            "model": model,
            "algorithm": algorithm,
            "metrics": metrics,
            "augment": self._augment(),
        }

    def _augment(self) -> Any:
        """Builds the augmentation; borders of crops are black."""
        if not self.study.augment:
            return None
        dataset = self._dataset()
        black = {} if dataset.byte_scale is None else {"fill": dataset.black}
        return compose(*(names.build("augmentations", "", table, **black) for table in self.study.augment))

    def _algorithm(self, case: Case, values: Mapping[str, float], swept: tuple[str, ...]) -> Any:
        """Builds the algorithm of a case, or if values are swept, returns the function that does."""
        label, table = case.labels["algorithms"], case.tables["algorithms"]

        def factory(**more: Any) -> Algorithm:
            made: Algorithm = names.build("algorithms", label, file.filled(table, {**values, **more}), **lengths)
            return made

        lengths = {}
        if file.has_schedule(table):
            given, data = self.study.simulate, self._partition(case, self.study.seeds[0])
            lengths = {"epochs": given["epochs"], "rounds_per_epoch": rounds_per_epoch(data, given["batch_size"])}
        return factory if swept else factory()

    def _grids(self, case: Case, wanted: str) -> dict[str, list[float]]:
        found = file.grids_of(case.tables["algorithms"])
        return {name: self.study.grids[name] for name, how in found.items() if how == wanted}

    def _faults(self, case: Case) -> list[Any]:
        given = case.tables["faults"]
        return [names.build("faults", "", table) for table in (given if isinstance(given, list) else [given])]

    def _dataset(self) -> Any:
        """Loads the data set, once."""
        if self._data is None:
            self._data = names.build("data", "", self.study.data)
        return self._data

    def _partition(self, case: Case, seed: int) -> Any:
        """Splits the data set, once per partition and seed."""
        label = case.labels["partitions"]
        if (label, seed) not in self._partitions:
            given = {"dataset": self._dataset(), "num_nodes": self.study.num_nodes, "seed": seed}
            table = case.tables["partitions"]
            data = names.build("partitions", label, file.without_sampling(table), **given)
            self._partitions[label, seed] = data.sampled(table["sampling"]) if "sampling" in table else data
        return self._partitions[label, seed]
