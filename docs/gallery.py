"""Puts what `python -m dcliques_jax.paper` measured into the documentation: python docs/gallery.py FOLDER.

Experiments that the folder does not hold stay as they are: those of MNIST and CIFAR-10 need not be run on one machine.
"""

import pathlib
import shutil
import sys

import dcliques_jax as dc


def main(results, gallery):
    report = gallery / "report.md"
    pages = {page.split("\n", 1)[0]: f"## {page.strip()}" for page in report.read_text().split("## ")[1:]}
    for outcome in dc.paper.report(results):
        page = outcome.markdown().replace(f"({outcome.name}/figure.png)", f"({outcome.name}.png)")
        pages[outcome.name] = page.strip()
        if (figure := outcome.folder / "figure.png").exists():
            shutil.copy(figure, gallery / f"{outcome.name}.png")
    report.write_text("\n\n".join(pages[name] for name in dc.paper.EXPERIMENTS if name in pages) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(__file__).parent / "paper")
