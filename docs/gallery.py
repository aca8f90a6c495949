"""Puts what `python -m dcliques_jax.paper` measured into the documentation: python docs/gallery.py FOLDER [FOLDER ...].

Copies accuracies from the folders to `docs/paper/results`, and reports on all that lies there. Experiments keep the
page that they have until all curves of their figure are there. Without a folder, makes the report and the figures
again.
"""

import dataclasses
import pathlib
import shutil
import sys
import tempfile

import numpy as np

import dcliques_jax as dc
from dcliques_jax.results import MEASURED

NEEDED = ("accuracy", "mean_model_accuracy", "consensus_distance", "nodes_right")


def keep(folder, results):
    """Copies what claims and figures need of the runs of a folder: accuracies of nodes and of images, and no models."""
    for path in sorted(folder.glob("runs/*/measured.npz")):
        copy = results / "runs" / path.parent.name / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.parent.name.startswith("skew-"):
            shutil.copy(path, copy)
            continue
        result = small(dc.Result.load(path))
        # A run that was stopped early has the name of the whole one.
        if not copy.exists() or dc.Result.load(copy).history.epoch[-1] <= result.history.epoch[-1]:
            result.save(copy)


def small(result):
    """The same result without its other measurements. Images come first in memory, which packs better."""
    history = result.history
    fields = {name: getattr(history, name)[..., :0] for name in MEASURED if name not in NEEDED}
    for name in ("nodes_right", "eval_examples"):
        counts = getattr(history, name)
        fields[name] = np.asfortranarray(counts.astype(np.min_scalar_type(counts.max(initial=0))))
    history = dataclasses.replace(history, **fields)
    return dataclasses.replace(result, history=history, topology=[], traffic=())


def whole(outcome):
    """Whether all curves of the figure were run; claims may need others beside."""
    experiment = dc.paper.EXPERIMENTS[outcome.name]
    return experiment.parts.keys() - getattr(experiment, "beside", {}).keys() <= outcome.measured.keys()


def main(folders, gallery):
    results = gallery / "results"
    for folder in folders:
        keep(folder, results)
    report = gallery / "report.md"
    pages = {page.split("\n", 1)[0]: f"## {page.strip()}" for page in report.read_text().split("## ")[1:]}
    with tempfile.TemporaryDirectory() as written:
        shutil.copytree(results, written, dirs_exist_ok=True)
        for outcome in dc.paper.report(written):
            if outcome.name in pages and not whole(outcome):
                continue
            page = outcome.markdown().replace(f"({outcome.name}/figure.png)", f"({outcome.name}.png)")
            pages[outcome.name] = page.strip()
            if (figure := outcome.folder / "figure.png").exists():
                shutil.copy(figure, gallery / f"{outcome.name}.png")
    report.write_text("\n\n".join(pages[name] for name in dc.paper.EXPERIMENTS if name in pages) + "\n")


if __name__ == "__main__":
    main(map(pathlib.Path, sys.argv[1:]), pathlib.Path(__file__).parent / "paper")
