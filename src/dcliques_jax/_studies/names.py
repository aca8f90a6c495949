"""From names and arguments in a file to the objects that they build."""

import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import optax
from flax import linen as nn

from dcliques_jax import (
    algorithms,
    augmentations,
    cliques,
    compressors,
    datasets,
    faults,
    models,
    partitions,
    schedules,
    topologies,
)
from dcliques_jax.metrics import per_class_accuracy

_OPTIMIZERS = ("adabelief", "adagrad", "adam", "adamw", "lamb", "lion", "rmsprop", "sgd", "yogi")
# Builders that take arrays or objects, which a file cannot hold.
_FOR_PYTHON = {"by_group", "from_arrays", "from_edges", "from_indices", "from_matrices", "from_networkx"}
_FOR_PYTHON |= {"feature_shift", "make_topology", "sequence"}
_CLIQUES = (cliques.greedy_swap, cliques.ideal_cliques, cliques.decentralised_greedy_swap)

Builders = Mapping[str, Callable[..., Any]]


def _builders(module: ModuleType, returns: type) -> Builders:
    """Returns the public functions of a module that return a type."""
    functions = dict(inspect.getmembers(module, inspect.isfunction))
    public = [name for name in functions if not name.startswith("_") and name not in _FOR_PYTHON]
    return {name: functions[name] for name in public if inspect.signature(functions[name]).return_annotation is returns}


BUILDERS: dict[str, Builders] = {
    "data": _builders(datasets, datasets.Dataset),
    "models": _builders(models, nn.Module),
    "partitions": _builders(partitions, partitions.PartitionedDataset),
    "topologies": _builders(topologies, topologies.Topology),
    "algorithms": _builders(algorithms, algorithms.Algorithm),
    "faults": _builders(faults, faults.Fault),
    "compressors": _builders(compressors, compressors.Compressor),
    "optimizers": {name: getattr(optax, name) for name in _OPTIMIZERS} | {"sgd_with_weight_decay": schedules.sgd},
    "schedules": {"in_epochs": schedules.in_epochs},
    "augmentations": {
        "crop_and_flip": augmentations.crop_and_flip,
        "random_erasing": augmentations.random_erasing,
    },
    "cliques": {each.__name__: each for each in _CLIQUES},
    "metrics": {"per_class_accuracy": per_class_accuracy},
}
"""The names that a study may use, by section of the file."""

# Arguments that are built themselves, from a table with `use`: their section, and what is passed to their builders.
_PARTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "algorithm": ("algorithms", ()),
    "cliques": ("cliques", ("label_distribution",)),
    "compressor": ("compressors", ()),
    "learning_rate": ("schedules", ("rounds_per_epoch", "epochs")),
    "optimizer": ("optimizers", ()),
    "topology": ("topologies", ("num_nodes", "label_distribution")),
}


def given_to(part: str) -> tuple[str, ...]:
    """Returns the arguments that are passed to builders of a part without being in its table."""
    return _PARTS[part][1]


def is_schedule(name: str, value: Any) -> bool:
    """Whether an argument is a learning rate that is a schedule."""
    return name == "learning_rate" and _is_part(name, value)


def _is_part(name: str, value: Any) -> bool:
    if name == "learning_rate":  # may also be a number, or come from a grid
        return isinstance(value, Mapping) and "use" in value
    return name in _PARTS and (name != "cliques" or isinstance(value, Mapping))  # cliques may also be a list of ids


def check(section: str, table: Any, where: str, given: tuple[str, ...] = ()) -> None:
    """Raises a `ValueError` unless a table names a builder and arguments that it takes.

    Args:
      section: section of `BUILDERS`.
      table: the table in the file.
      where: the key of the table, for messages.
      given: arguments that are passed without being in the table.
    """
    if not isinstance(table, Mapping):
        raise ValueError(f"{where}={table!r} must be a table, with the name of a builder as `use`")
    known, use = BUILDERS[section], table.get("use", where.rpartition(".")[2])
    if not isinstance(use, str) or use not in known:
        raise ValueError(f"{where}.use={use!r} is unknown: choose one of {', '.join(known)}")
    parameters = inspect.signature(known[use]).parameters
    several = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    for name, value in table.items():
        if name != "use" and name not in parameters and not several:
            raise ValueError(
                f"{where}.{name}={value!r} is not an argument of {use}, which takes {', '.join(parameters)}"
            )
        if _is_part(name, value):
            part, passed = _PARTS[name]
            check(part, value, f"{where}.{name}", passed)
    needed = [
        name for name, each in parameters.items() if each.default is each.empty and each.kind < each.VAR_POSITIONAL
    ]
    needed += [n for n, each in parameters.items() if each.default is each.empty and each.kind is each.KEYWORD_ONLY]
    missing = [name for name in needed if name not in table and name not in given]
    if missing:
        raise ValueError(f"{where} has no {missing[0]}: {use} takes {', '.join(parameters)}")


def build(section: str, label: str, table: Mapping[str, Any], **given: Any) -> Any:
    """Builds what a table describes, and its parts.

    `given` are arguments for builders that take them, unless the table has them.
    """
    use = table.get("use", label)
    builder = BUILDERS[section][use]
    parameters = inspect.signature(builder).parameters
    arguments = {name: value for name, value in given.items() if name in parameters}
    for name, value in table.items():
        if name != "use":
            arguments[name] = build(_PARTS[name][0], "", value, **given) if _is_part(name, value) else value
    return builder(**arguments)
