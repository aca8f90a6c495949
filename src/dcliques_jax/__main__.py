"""The command line: `python -m dcliques_jax run | report | list`."""

import argparse
import re
import sys
from collections.abc import Sequence

from dcliques_jax import studies


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 2 after an error, 130 after an interrupt."""
    requested = _parser().parse_args(arguments)
    try:
        requested.command(requested)
        return 0
    except KeyboardInterrupt:
        print("interrupted: pass --resume to continue", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dcliques_jax", description="Runs studies and reports on them.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("run", help="run a study")
    command.add_argument("study", metavar="FILE", help="a TOML file, or the name of a shipped study")
    command.add_argument("--out", metavar="DIR", help="output folder (default: the title, as in quick-start)")
    command.add_argument("--resume", action="store_true", help="continue in a folder that holds results")
    command.add_argument("--only", nargs="+", default=[], metavar="LABEL", help="restrict the study to these labels")
    command.add_argument("--nodes", type=int, metavar="N", help="use N nodes instead, with smaller batches")
    command.add_argument("--epochs", type=int, metavar="N", help="train for N epochs instead, to try a long study")
    command.add_argument("--until", type=float, metavar="EPOCH", help="stop at the first evaluation from this epoch on")
    command.set_defaults(command=_run)
    command = commands.add_parser("report", help="write a report of a folder of results")
    command.add_argument("out", metavar="DIR")
    command.set_defaults(command=_report)
    command = commands.add_parser("list", help="list the shipped studies, and the names that a study may use")
    command.set_defaults(command=_list)
    return parser


def _run(requested: argparse.Namespace) -> None:
    study = studies.read(requested.study)
    if requested.nodes is not None:
        study = study.resized(requested.nodes)
    if requested.epochs is not None:
        study = study.lasting(requested.epochs)
    out = requested.out or "-".join(re.findall(r"\w+", study.title.lower()))
    outcomes = studies.run(study, out, resume=requested.resume, only=requested.only, until=requested.until)
    refused = [outcome for outcome in outcomes if outcome.refused is not None]
    print(f"{len(outcomes) - len(refused)} cases have results, {len(refused)} are not possible; written to {out}")
    for outcome in refused:
        print(f"  {outcome.case.name()}: {outcome.refused}")


def _report(requested: argparse.Namespace) -> None:
    print(studies.report(requested.out))


def _list(_: argparse.Namespace) -> None:
    for name, path in studies.shipped().items():
        print(f"{name:<16}{studies.read(path).title}, {len(studies.read(path).cases())} cases")
    print()
    for section in studies.SECTIONS:
        print(f"{section:<16}{', '.join(studies.names_of(section))}")


if __name__ == "__main__":
    sys.exit(main())
