"""Runs all benchmarks and writes a table, in Markdown and in JSON.

    python benchmarks/run.py [--quick] [--only rounds convolutions ...] [--out FOLDER]

One file asks one question; `README.md` tells the method. With `--quick` everything is tiny: it shows that the scripts
work and that both sides compute the same, not how fast they are.
"""

import argparse
import dataclasses
import importlib
import importlib.metadata
import json
import os
import pathlib
import platform

QUESTIONS = (
    "rounds",
    "algorithms",
    "faults",
    "convolutions",
    "networks",
    "mixing",
    "evaluation",
    "runs",
    "graphs",
    "scaling",
)
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "scipy", "torch")


def machine():
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    info = pathlib.Path("/proc/cpuinfo")
    names = (
        [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if (info.exists())
        else []
    )
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        **versions,
    }


def amount(value, unit):
    if value is None:
        return ""
    scales = {"s": ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")), "B": ((1e6, "MB"), (1e3, "kB"), (1, "B"))}
    scale, name = next((s for s in scales[unit] if abs(value) >= s[0]), scales[unit][-1])
    return f"{value / scale:.3g} {name}"


def table(lines):
    rows = ["| question | workload | subject | minimum | median | against | its minimum | ratio | goal | note |"]
    rows.append("|" + "---|" * 10)
    for line in lines:
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        cells = (
            line.question, line.workload, line.subject, amount(line.best, line.unit), amount(line.median, line.unit),
            line.against, amount(line.against_best, line.unit), ratio, line.goal, line.note,
        )  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny problems, to see that the scripts work")
    parser.add_argument("--only", nargs="+", choices=QUESTIONS, default=QUESTIONS, metavar="QUESTION")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benchmark-results"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lines = []
    for name in options.only:
        for line in importlib.import_module(name).measure(options.quick):
            lines.append(line)
            print(f"{line.question}, {line.workload}, {line.subject}: {amount(line.best, line.unit)}"
                  + (f", {line.ratio:.2f} against {line.against}" if line.ratio else ""), flush=True)  # fmt: skip
    facts = machine()
    text = "\n".join(f"- {name}: {value}" for name, value in facts.items()) + "\n\n" + table(lines) + "\n"
    (options.out / "results.md").write_text(text)
    records = [dataclasses.asdict(line) | {"ratio": line.ratio} for line in lines]
    (options.out / "results.json").write_text(json.dumps({"machine": facts, "lines": records}, indent=1))
    print(f"\nwritten to {options.out}/results.md and results.json")


if __name__ == "__main__":
    main()
