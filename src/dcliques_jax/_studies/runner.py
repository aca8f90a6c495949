"""Runs the cases of a study."""

import os
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from dcliques_jax import _checks
from dcliques_jax._simulate import refusal
from dcliques_jax._store import files
from dcliques_jax._store.provenance import versions
from dcliques_jax._studies import kept
from dcliques_jax._studies.cases import Builder
from dcliques_jax._studies.file import Case, Study
from dcliques_jax.datasets import Dataset
from dcliques_jax.results import Result

COPY, REFUSED = "study.json", "refused.json"
_LENGTHS = ("epochs", "rounds")


class Outcome(NamedTuple):
    """What became of a case."""

    case: Case
    result: Result | None  # None if the case is not possible, or not run yet
    refused: str | None = None  # why it is not possible
    values: Mapping[str, float] = MappingProxyType({})  # the tuned values


def run(
    study: Study,
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    only: Iterable[str] = (),
    until: float | None = None,
    progress: bool = True,
) -> list[Outcome]:
    """Runs the cases of a study that are not finished; returns the outcomes of all that were chosen."""
    from tqdm.auto import tqdm

    folder = pathlib.Path(out)
    until = None if until is None else _checks.real("until", until, 0)
    chosen = _chosen(study, list(only))
    if (folder / COPY).exists() and not resume:
        raise ValueError(f"{folder} holds runs of a study: continue with --resume, or choose another folder")
    runner = Runner(study, folder, resume=resume, until=until)
    runner.check(chosen)
    folder.mkdir(parents=True, exist_ok=True)
    files.write_json(folder / COPY, {"study": study._asdict()})
    outcomes = []
    with tqdm(chosen, unit="case", disable=not (progress and sys.stderr.isatty())) as bar:
        for case in bar:
            bar.set_description(case.name())
            outcomes.append(runner.outcome(case))
    return outcomes


def kept_outcomes(folder: pathlib.Path) -> list[Outcome]:
    """Loads the outcomes of all cases of a folder, also of those that were not run."""
    runner = Runner(read_study(folder), folder)
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


class Runner:
    """Runs cases of a study and keeps what was measured in a folder, one folder per case.

    Args:
      study: the study.
      folder: folder of all results.
      dataset: function that loads the data set, instead of that of the study.
      resume: whether to continue runs that were stopped.
      until: epoch after which every run stops; a later runner continues it.
      keep_examples: whether to keep how many nodes are right on each test example, the largest part of a history.
      progress: whether each run shows a bar.
    """

    def __init__(
        self,
        study: Study,
        folder: pathlib.Path,
        *,
        dataset: Callable[[], Dataset] | None = None,
        resume: bool = False,
        until: float | None = None,
        keep_examples: bool = False,
        progress: bool = False,
    ) -> None:
        self.study, self.folder = study, folder
        self.resume, self.until, self.progress = resume, until, progress
        self._built = Builder(study, dataset)
        self._kept_part = (lambda result: result) if keep_examples else kept.without_examples

    def check(self, cases: Iterable[Case]) -> None:
        """Builds what unfinished cases consist of, so that wrong values are refused before hours of other cases."""
        first = {name: grid[0] for name, grid in self.study.grids.items()}
        unfinished = [case for case in cases if self.kept(case).result is None]
        for case in {(c.labels["partitions"], c.labels["topologies"]): c for c in unfinished}.values():
            self._built.arguments(case, self.study.seeds[:1], first)

    def folder_of(self, case: Case) -> pathlib.Path:
        """Returns the folder of a case. Cases that differ in anything have different folders."""
        return self.folder / "runs" / case.id(self.study)

    def kept(self, case: Case) -> Outcome:
        """Loads what is known of a case."""
        folder = self.folder_of(case)
        if (folder / REFUSED).exists():
            return Outcome(case, None, str(files.read_json(folder / REFUSED)["reason"]))
        result = kept.found(folder)
        return Outcome(case, result, None, {} if result is None else dict(result.provenance["tuned"]))

    def outcome(self, case: Case) -> Outcome:
        """Runs a case, unless that is done."""
        known, folder = self.kept(case), self.folder_of(case)
        if known.result is not None:
            self._check_origin(known.result, folder)
            reached = self.until is not None and known.result.history.epoch[-1] >= self.until
            if reached or kept.is_finished(known.result):
                return known
        elif (refused := self._refusal(case)) is not None:
            return self._refused(case, refused)
        (folder / REFUSED).unlink(missing_ok=True)  # another version or machine may allow it
        if kept.has_checkpoint(folder) and not self.resume:
            raise ValueError(f"{folder} holds an unfinished run: continue it with --resume, or choose another --out")
        values = self._tuned(case)
        if values is None:
            return self._refused(case, "all values of its grids diverged: add smaller ones")
        swept = self._built.grids(case, "sweep")
        result = self._trained(
            case, folder, self.study.seeds, values, swept, self.study.simulate, until=self.until, tuned=values
        )
        return Outcome(case, result, None, values)

    def _refused(self, case: Case, reason: str) -> Outcome:
        """Keeps why a case is not possible."""
        folder = self.folder_of(case)
        folder.mkdir(parents=True, exist_ok=True)
        files.write_json(folder / REFUSED, {"reason": reason})
        return Outcome(case, None, reason)

    def _check_origin(self, found: Result, folder: pathlib.Path) -> None:
        """Raises a `ValueError` if results come from other data or another version."""
        ours = {"dataset_checksum": self._built.dataset.checksum, "version": versions()["dcliques_jax"]}
        theirs = {**found.provenance, "version": found.provenance["versions"]["dcliques_jax"]}
        for name, value in ours.items():
            if theirs[name] != value:
                raise ValueError(
                    f"{folder} holds results of another run: {name} was {theirs[name]} and is {value}; choose another "
                    "--out"
                )

    def _refusal(self, case: Case) -> str | None:
        """Returns why the algorithm does not allow this topology or these faults."""
        seeds = self.study.seeds
        first = {name: grid[0] for name, grid in self.study.grids.items()}
        arguments = self._built.arguments(case, seeds, first)
        batch_size = self.study.simulate.get("batch_size")
        return refusal(**arguments, batch_size=batch_size, faults=self._built.faults(case), seeds=seeds)

    def _tuned(self, case: Case) -> dict[str, float] | None:
        """Returns the best values of the grids to tune, None if all diverged.

        They are measured without faults: cases with faults share them.
        """
        grids = self._built.grids(case, "tune")
        if not grids:
            return {}
        without = case.without("faults")
        folder = self.folder / "tuning" / without.id(self.study)
        result = kept.found(folder)
        if result is not None:
            self._check_origin(result, folder)
        else:
            tune = dict(self.study.tune)
            seeds, metric = tune.pop("seeds"), tune.pop("metric")
            lengths = self.study.simulate | tune
            if tune.keys() & set(_LENGTHS):
                lengths = {name: value for name, value in lengths.items() if name in tune or name not in _LENGTHS}
            lengths["eval_every"] = lengths.get("rounds") or lengths.get("epochs", 10)  # only the end counts
            result = self._trained(without, folder, seeds, {}, grids, lengths, best_by=metric)
        if result.combinations():
            return None
        return {name: float(value) for name, value in result.provenance["sweep"].items()}

    def _trained(
        self,
        case: Case,
        folder: pathlib.Path,
        seeds: list[int],
        values: Mapping[str, float],
        sweep: Mapping[str, list[float]],
        lengths: dict[str, Any],
        *,
        until: float | None = None,
        best_by: str | None = None,
        **about: Any,
    ) -> Result:
        """Simulates a case with values for some of the grids and a sweep over others, and keeps the result."""
        arguments = self._built.arguments(case, seeds, values, tuple(sweep)) | lengths
        arguments["faults"] = self._built.faults(case) if "faults" in case.tables else None
        trained = kept.trained(
            folder, until=until, sweep=sweep or None, seeds=seeds, progress=self.progress, **arguments
        )
        best = trained.result if best_by is None else kept.best(trained.result, best_by)
        return kept.keep(folder, trained, self._kept_part(best), case=case.labels, **about)
