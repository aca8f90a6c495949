"""What the tables of a case stand for: data, topologies, model, algorithm and faults."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from dcliques_jax._studies import file, names
from dcliques_jax._studies.file import Case, Study
from dcliques_jax.algorithms import Algorithm
from dcliques_jax.augmentations import compose
from dcliques_jax.datasets import Dataset
from dcliques_jax.partitions import PartitionedDataset
from dcliques_jax.schedules import rounds_per_epoch


class Builder:
    """Builds the cases of a study. The data set is loaded when it is needed, and split once per partition and seed."""

    def __init__(self, study: Study, load: Callable[[], Dataset] | None = None) -> None:
        self.study = study
        self._load = load or (lambda: _told("data", "data", "", study.data))
        self._partitions: dict[tuple[str, int], PartitionedDataset] = {}

    @functools.cached_property
    def dataset(self) -> Dataset:
        """The data set of the study, or what was passed in its place."""
        return self._load()

    def partition(self, case: Case, seed: int) -> PartitionedDataset:
        """Splits the data set."""
        label = case.labels["partitions"]
        if (label, seed) not in self._partitions:
            given = {"dataset": self.dataset, "num_nodes": self.study.num_nodes, "seed": seed}
            table = case.tables["partitions"]
            data = _told(f"partitions.{label}", "partitions", label, file.without_sampling(table), **given)
            self._partitions[label, seed] = data.sampled(table["sampling"]) if "sampling" in table else data
        return self._partitions[label, seed]

    def arguments(
        self, case: Case, seeds: list[int], values: Mapping[str, float], swept: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Builds arguments of `simulate`: one topology and one partition per seed, the model and the algorithm.

        Args:
          case: the case.
          seeds: the seeds.
          values: values for some of the grids that the algorithm refers to.
          swept: names of the other grids, which become arguments of a function that makes the algorithm.
        """
        study, label, table = self.study, case.labels["topologies"], case.tables["topologies"]
        data = [self.partition(case, seed) for seed in seeds]
        given = [
            {"num_nodes": study.num_nodes, "label_distribution": each.label_distribution, "seed": seed}
            for each, seed in zip(data, seeds, strict=True)
        ]
        graphs = [_told(f"topologies.{label}", "topologies", label, table, **each) for each in given]
        model = _told("model", "models", "", study.model, num_classes=self.dataset.num_classes)
        metrics = {name: names.build("metrics", name, table, model=model) for name, table in study.metrics.items()}
        return {
            "topology": graphs,
            "dataset": data,
            "model": model,
            "algorithm": self._algorithm(case, data, values, swept),
            "metrics": metrics,
            "augment": self._augment(),
        }

    def faults(self, case: Case) -> list[Any]:
        """Builds the faults."""
        several = file.each_fault(case.labels["faults"], case.tables["faults"])
        return [names.build("faults", label, table) for _, label, table in several]

    def grids(self, case: Case, wanted: str) -> dict[str, list[float]]:
        """Returns the grids that the algorithm of a case wants to "tune" or to "sweep"."""
        found = file.grids_of(case.tables["algorithms"])
        return {name: self.study.grids[name] for name, how in found.items() if how == wanted}

    def _algorithm(
        self, case: Case, data: list[PartitionedDataset], values: Mapping[str, float], swept: tuple[str, ...]
    ) -> Any:
        label, table = case.labels["algorithms"], case.tables["algorithms"]
        lengths = {}
        if file.has_schedule(table):
            given = self.study.simulate
            of_seeds = [rounds_per_epoch(each, given["batch_size"]) for each in data]
            # As in a run of all seeds: the largest node decides, and the smallest one if batches must be full.
            longest = min(of_seeds) if data[0].sampling == "full_batches" else max(of_seeds)
            lengths = {"epochs": given["epochs"], "rounds_per_epoch": longest}

        def factory(**more: Any) -> Algorithm:
            made: Algorithm = names.build("algorithms", label, file.filled(table, {**values, **more}), **lengths)
            return made

        return factory if swept else factory()

    def _augment(self) -> Any:
        """Builds the augmentation; borders of crops are black."""
        if not self.study.augment:
            return None
        black = {} if self.dataset.byte_scale is None else {"fill": self.dataset.black}
        return compose(*(names.build("augmentations", "", table, **black) for table in self.study.augment))


def _told(where: str, section: str, label: str, table: Mapping[str, Any], **given: Any) -> Any:
    """Builds what a table describes; errors name the table."""
    try:
        return names.build(section, label, table, **given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error
