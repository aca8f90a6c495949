"""The file of a study: what it may hold, and the runs that it describes."""

import itertools
import json
import pathlib
import tomllib
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dcliques_jax import _checks
from dcliques_jax._partitions.partitioned import SAMPLINGS
from dcliques_jax._studies import names
from dcliques_jax.results import MEASURED

# The sections of alternatives, all combinations of which are runs, and what a missing one means.
AXES = {
    "partitions": {"iid": {}},
    "topologies": {},
    "algorithms": {"dsgd": {}},
    "faults": {"none": []},
}
_TUNING = {"evaluate_on": "validation", "metric": "accuracy", "seeds": [0]}
_ARGUMENTS = (
    "epochs",
    "rounds",
    "batch_size",
    "init",
    "eval_every",
    "eval_nodes",
    "eval_examples",
    "evaluate_on",
)
_KEYS = (
    "title",
    "num_nodes",
    "seeds",
    "data",
    "model",
    "augment",
    "simulate",
    "metrics",
    "grids",
    "tune",
    "skip",
    "targets",
    *AXES,
)


class Case(NamedTuple):
    """One combination of a study: runs of all seeds."""

    labels: dict[str, str]  # by section of `AXES`
    tables: dict[str, Any]  # what each label stands for

    def name(self) -> str:
        """Returns the labels in one line."""
        return ", ".join(label for section, label in self.labels.items() if label != "none")

    def without(self, section: str) -> "Case":
        """Returns the case without one of its sections."""
        parts = [{key: value for key, value in part.items() if key != section} for part in self]
        return Case(*parts)

    def id(self, study: "Study") -> str:
        """Returns a name for files, with a checksum of all that the results depend on."""
        used = grids_of(self.tables["algorithms"])
        parts = [self.tables, study.common(), {name: study.grids[name] for name in used}]
        parts += [study.tune] * ("tune" in used.values())
        words = "-".join("".join(c if c.isalnum() else "_" for c in label) for label in self.labels.values())
        return f"{words}-{zlib.crc32(json.dumps(parts, sort_keys=True).encode()):08x}"


class Study(NamedTuple):
    """A checked study."""

    title: str
    num_nodes: int
    seeds: list[int]
    data: dict[str, Any]
    model: dict[str, Any]
    augment: list[dict[str, Any]]  # augmentations, the first one first
    simulate: dict[str, Any]
    metrics: dict[str, Any]
    grids: dict[str, list[float]]
    tune: dict[str, Any]
    skip: list[dict[str, Any]]
    targets: list[float]  # accuracies until which to count messages, bytes and seconds
    axes: dict[str, dict[str, Any]]

    def common(self) -> dict[str, Any]:
        """Returns what all cases share and their results depend on."""
        kept = ["num_nodes", "seeds", "data", "model", "simulate", "metrics"]
        return {name: getattr(self, name) for name in kept + ["augment"] * bool(self.augment)}

    def resized(self, num_nodes: int) -> "Study":
        """Returns the study with another number of nodes, and batches that keep about as many rounds per epoch."""
        num_nodes = _checks.integer("num_nodes", num_nodes, 1)
        simulate = dict(self.simulate)
        if "batch_size" in simulate:
            simulate["batch_size"] = max(1, round(simulate["batch_size"] * self.num_nodes / num_nodes))
        return self._replace(title=f"{self.title}, {num_nodes} nodes", num_nodes=num_nodes, simulate=simulate)

    def lasting(self, epochs: int) -> "Study":
        """Returns the study with another length. Learning rates in epochs, and tuning, are stretched with it.

        A study in rounds is evaluated after every epoch instead.
        """
        epochs = _checks.integer("epochs", epochs, 1)
        in_rounds = {"rounds", "eval_every"} if "rounds" in self.simulate else set()
        simulate = {name: value for name, value in self.simulate.items() if name not in in_rounds} | {"epochs": epochs}
        factor = epochs / self.simulate.get("epochs", epochs)
        if isinstance(every := simulate.get("eval_every"), list):
            simulate["eval_every"] = sorted({max(1, round(at * factor)) for at in every})
        tune = dict(self.tune)
        if "epochs" in tune:
            tune["epochs"] = max(1, round(tune["epochs"] * factor))
        stretched = {label: _stretched(table, factor) for label, table in self.axes["algorithms"].items()}
        return self._replace(simulate=simulate, tune=tune, axes=self.axes | {"algorithms": stretched})

    def cases(self) -> list[Case]:
        """Returns all combinations, without those to skip."""
        found = []
        for chosen in itertools.product(*self.axes.values()):
            labels = dict(zip(self.axes, chosen, strict=True))
            if not any(_matches(rule, labels) for rule in self.skip):
                found.append(Case(labels, {section: self.axes[section][label] for section, label in labels.items()}))
        return found


def read(path: pathlib.Path) -> Study:
    """Reads and checks the file of a study. A `ValueError` names the key, its value and what would do."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    try:
        return parse(given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def parse(given: Mapping[str, Any]) -> Study:
    """Checks the tables of a study."""
    _known("", given, _KEYS)
    _check_kinds(given)
    if "topologies" not in given or "data" not in given:
        raise ValueError("a study needs at least the sections [data] and [topologies]")
    axes: dict[str, Any] = {section: dict(given.get(section, default)) for section, default in AXES.items()}
    grids = {name: _numbers(f"grids.{name}", values) for name, values in given.get("grids", {}).items()}
    _check_axes(axes, grids)
    names.check("data", given["data"], "data")
    model = given.get("model", {"use": "logistic_regression"})
    names.check("models", model, "model", ("num_classes",))
    for label, table in given.get("metrics", {}).items():
        names.check("metrics", table, f"metrics.{label}", ("model",))
    arguments = given.get("simulate", {})
    _known("simulate", arguments, _ARGUMENTS)
    _check_length("simulate", arguments)
    if any(map(has_schedule, axes["algorithms"].values())) and not {"epochs", "batch_size"} <= arguments.keys():
        raise ValueError("a learning rate in epochs needs simulate.epochs and simulate.batch_size")
    tune = _tuning(given)
    skip = given.get("skip", [])
    skip = [skip] if isinstance(skip, Mapping) else skip
    for number, rule in enumerate(skip):
        _check_rule(f"skip[{number}]", rule, axes)
    return Study(
        title=str(given.get("title", "study")),
        num_nodes=_checks.integer("num_nodes", given.get("num_nodes"), 1),
        seeds=_seeds("seeds", given.get("seeds", [0])),
        data=dict(given["data"]),
        model=dict(model),
        augment=_augmentations(given.get("augment", [])),
        simulate=dict(arguments),
        metrics=dict(given.get("metrics", {})),
        grids=grids,
        tune=tune,
        skip=list(skip),
        targets=[_checks.share("targets", value) for value in given.get("targets", [])],
        axes=axes,
    )


def _check_kinds(given: Mapping[str, Any]) -> None:
    """Raises a `ValueError` unless sections are tables and lists are lists."""
    for name in ("data", "model", "simulate", "metrics", "grids", "tune", *AXES):
        if not isinstance(given.get(name, {}), Mapping):
            raise ValueError(f"{name}={given[name]!r} must be a table")
    for name in ("targets", "skip", "augment"):
        if not isinstance(given.get(name, []), list if name == "targets" else (list, Mapping)):
            raise ValueError(f"{name}={given[name]!r} must be a list")
    try:
        json.dumps(given)
    except TypeError as error:
        raise ValueError(f"a study holds numbers, strings, lists and tables only: {error}") from None


def _check_axes(axes: Mapping[str, Any], grids: Mapping[str, list[float]]) -> None:
    first = {name: values[0] for name, values in grids.items()}
    for label, table in axes["partitions"].items():
        where = f"partitions.{label}"
        names.check("partitions", without_sampling(table, where), where, ("dataset", "num_nodes"))
    for label, table in axes["topologies"].items():
        names.check("topologies", table, f"topologies.{label}", names.given_to("topology"))
    for label, table in axes["algorithms"].items():
        _check_grids(f"algorithms.{label}", table, grids)
        names.check("algorithms", table, f"algorithms.{label}")
        if not has_schedule(table):  # learning rates in epochs need the data
            _check_values(f"algorithms.{label}", "algorithms", label, filled(table, first))
    for label, several in axes["faults"].items():
        for where, default, table in each_fault(label, several):
            names.check("faults", table, where)
            _check_values(where, "faults", default, table)


def each_fault(label: str, given: Any) -> list[tuple[str, str, Any]]:
    """Returns the faults of a label, a table or a list of them: the key, the label that may name it, and the table."""
    if isinstance(given, list):
        return [(f"faults.{label}[{number}]", "", table) for number, table in enumerate(given)]
    return [(f"faults.{label}", label, given)]


def _check_values(where: str, section: str, label: str, table: Mapping[str, Any]) -> None:
    """Builds what needs no data, so that wrong values are refused before hours of other cases."""
    try:
        names.build(section, label, table)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from None


def _tuning(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how values are tuned, checked."""
    tune = _TUNING | given.get("tune", {})
    _known("tune", tune, (*_TUNING, "epochs", "rounds"))
    _check_length("tune", tune)
    _checks.choice("tune.evaluate_on", tune["evaluate_on"], ("test", "validation"))
    measured = [name for name in MEASURED if name != "local_accuracy"]  # no table gives nodes tests of their own
    _checks.choice("tune.metric", tune["metric"], (*measured, *given.get("metrics", {})))
    return tune | {"seeds": _seeds("tune.seeds", tune["seeds"])}


def _seeds(where: str, values: Any) -> list[int]:
    if not isinstance(values, list) or not values:
        raise ValueError(f"{where}={values!r} must be a list of numbers")
    return [_checks.integer(where, seed, 0) for seed in values]


def _check_length(where: str, table: Mapping[str, Any]) -> None:
    for name in ("epochs", "rounds", "batch_size"):
        if table.get(name) is not None:
            _checks.integer(f"{where}.{name}", table[name], 1)
    if {"epochs", "rounds"} <= table.keys():
        epochs, rounds = table["epochs"], table["rounds"]
        raise ValueError(f"{where}.epochs={epochs!r} and {where}.rounds={rounds!r}: pass either, not both")


def _augmentations(given: Any) -> list[dict[str, Any]]:
    several = [given] if isinstance(given, Mapping) else given
    for number, table in enumerate(several):
        names.check("augmentations", table, f"augment[{number}]")
    return [dict(table) for table in several]


def grids_of(table: Any) -> dict[str, str]:
    """Returns the names of the grids that an algorithm refers to, and whether to "tune" or to "sweep" each."""
    found: dict[str, str] = {}
    for value in table.values() if isinstance(table, Mapping) else ():
        if is_grid(value):
            ((how, name),) = value.items()
            if not isinstance(name, str):
                raise ValueError(f"{{{how} = {name!r}}} must be the name of a list of [grids]")
            found[name] = how
        else:
            found |= grids_of(value)
    return found


def has_schedule(table: Any) -> bool:
    """Whether an algorithm, or a part of it, has a learning rate in epochs."""
    if not isinstance(table, Mapping):
        return False
    return any(names.is_schedule(name, value) or has_schedule(value) for name, value in table.items())


def without_sampling(table: Any, where: str = "") -> Any:
    """Returns the table of a partition without its way of sampling, which is no argument of its builder."""
    if not isinstance(table, Mapping) or "sampling" not in table:
        return table
    _checks.choice(f"{where}.sampling", table["sampling"], SAMPLINGS)
    return {name: value for name, value in table.items() if name != "sampling"}


def is_grid(value: Any) -> bool:
    """Whether a value in a file stands for those of a grid."""
    return isinstance(value, Mapping) and len(value) == 1 and set(value) <= {"tune", "sweep"}


def filled(table: Any, values: Mapping[str, Any]) -> Any:
    """Puts values in the place of grids."""
    if is_grid(table):
        return values[next(iter(table.values()))]
    return {name: filled(value, values) for name, value in table.items()} if isinstance(table, Mapping) else table


def _stretched(table: Any, factor: float) -> Any:
    """Multiplies the epochs of all schedules in a table."""
    if not isinstance(table, Mapping):
        return table
    found = {name: _stretched(value, factor) for name, value in table.items()}
    for name, value in table.items():
        if names.is_schedule(name, value):
            epochs = {key: value[key] for key in ("warm_up", "drops") if key in value}
            found[name] |= {key: np.multiply(times, factor).tolist() for key, times in epochs.items()}
    return found


def _check_grids(where: str, table: Any, grids: Mapping[str, Any]) -> None:
    used = grids_of(table)
    for name, how in used.items():
        if name not in grids:
            raise ValueError(f"{where} refers to {{{how} = {name!r}}}, but [grids] has {', '.join(grids) or 'none'}")
    if len(set(used.values())) > 1:
        raise ValueError(f"{where} tunes some grids and sweeps others ({used}): do either, in two algorithms for both")


def _check_rule(where: str, rule: Any, axes: Mapping[str, Any]) -> None:
    _known(where, rule, tuple(axes))
    for section, labels in rule.items():
        for label in labels if isinstance(labels, list) else [labels]:
            if not isinstance(label, str) or label not in axes[section]:
                raise ValueError(f"{where}.{section}={label!r} is unknown: choose one of {', '.join(axes[section])}")


def _matches(rule: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    return all(
        labels[section] in (wanted if isinstance(wanted, list) else [wanted]) for section, wanted in rule.items()
    )


def _known(where: str, table: Any, keys: tuple[str, ...]) -> None:
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}={table!r} must be a table")
    for key, value in table.items():
        if key not in keys:
            place = f"{where}.{key}" if where else key
            raise ValueError(f"{place}={value!r} is unknown: choose one of {', '.join(keys)}")


def _numbers(where: str, values: Any) -> list[float]:
    if not isinstance(values, list) or not values:
        raise ValueError(f"{where}={values!r} must be a list of numbers")
    return [_checks.real(where, value, -float("inf")) for value in values]
