"""Puts what `python -m dcliques_jax.paper` measured into the documentation: python docs/gallery.py FOLDER."""

import pathlib
import shutil
import sys

import dcliques_jax as dc


def main(results):
    target = pathlib.Path(__file__).parent / "paper"
    outcomes = dc.paper.report(results)
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    pages = []
    for outcome in outcomes:
        pages.append(outcome.markdown().replace(f"({outcome.name}/figure.png)", f"({outcome.name}.png)"))
        if (figure := outcome.folder / "figure.png").exists():
            shutil.copy(figure, target / f"{outcome.name}.png")
    (target / "report.md").write_text("\n".join(pages))


if __name__ == "__main__":
    main(sys.argv[1])
