"""Studies: one file that says what to compare, and one command that runs it.

A study is a TOML file. It names data, partitions, topologies, algorithms and faults by the public names of this library
and their arguments; all combinations are run with all seeds:

    title = "Quick start"
    num_nodes = 100
    seeds = [0, 1]
    data = {use = "mnist_5k"}
    simulate = {epochs = 20}
    [partitions.shards]
    [topologies.ring]
    [topologies.d_cliques]
    clique_size = 10
    [algorithms.dsgd]
    optimizer = {use = "sgd", learning_rate = 0.1}

The name of a table is its label in reports, and the builder unless the table has `use`. `num_nodes`,
`label_distribution` and `seed` are passed to builders that take them. `python -m dcliques_jax run FILE` runs a study.
"""

import os
import pathlib
from collections.abc import Iterable
from typing import Any

from dcliques_jax._studies import file, names, runner, tables
from dcliques_jax._studies.file import Case, Study
from dcliques_jax._studies.runner import Outcome

__all__ = [
    "SECTIONS",
    "Case",
    "Outcome",
    "Study",
    "load",
    "names_of",
    "parse",
    "read",
    "read_study",
    "report",
    "run",
    "shipped",
]

parse = file.parse
SECTIONS = tuple(names.BUILDERS)
_SHIPPED = pathlib.Path(__file__).parent / "_studies" / "shipped"


def read(path: str | os.PathLike[str]) -> Study:
    """Reads the file of a study, or a shipped study by its name. A `ValueError` names what is wrong in it."""
    given = pathlib.Path(path)
    return file.read(given if given.is_file() else shipped().get(os.fspath(path), given))


def shipped() -> dict[str, pathlib.Path]:
    """Returns the studies that come with the library, by name.

    >>> sorted(shipped())
    ['comparison', 'one_page', 'quickstart']
    """
    return {path.stem: path for path in sorted(_SHIPPED.glob("*.toml"))}


def names_of(section: str) -> list[str]:
    """Returns the names that a section of a study may use.

    >>> names_of("compressors")
    ['quantise', 'random_k', 'top_k']
    """
    return list(names.BUILDERS[section])


def run(
    study: Study | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    resume: bool = False,
    only: Iterable[str] = (),
    until: float | None = None,
    progress: bool = True,
) -> list[Outcome]:
    """Runs the cases of a study that are not finished, and returns their outcomes.

    Each case is kept in a folder of its own, so that nothing finished is run again, and an interrupted case resumes
    from its checkpoint with the same bits. A case that an algorithm does not allow is kept as such, with the reason.
    A run, but not a sweep, that is evaluated on some nodes or examples is evaluated on all of them at its end
    (`final.npz`).

    Args:
      study: a study, its file, or the name of a shipped one.
      out: folder of the results.
      resume: whether to continue in a folder that holds results.
      only: labels to restrict the study to, such as `["ring", "dsgd"]`.
      until: every run stops at its first evaluation from this epoch on. A later call with `resume` continues.
      progress: whether to show the whole study with the time left, in terminals.
    """
    checked = study if isinstance(study, Study) else read(study)
    return runner.run(checked, out, resume=resume, only=only, until=until, progress=progress)


def read_study(out: str | os.PathLike[str]) -> Study:
    """Returns the study whose results a folder holds."""
    return runner.read_study(pathlib.Path(out))


def load(out: str | os.PathLike[str]) -> Any:
    """Returns all evaluations of a folder as one pandas table, with a row per case, seed and evaluation."""
    return tables.load(pathlib.Path(out))


def report(out: str | os.PathLike[str]) -> str:
    """Writes `report.md` and its figures into a folder of results, and returns the text."""
    return tables.write_report(pathlib.Path(out))
