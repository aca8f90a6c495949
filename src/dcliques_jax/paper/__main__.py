"""The command line: `python -m dcliques_jax.paper list | run | report`."""

import argparse
import sys
from collections.abc import Sequence

from dcliques_jax import _checks
from dcliques_jax._engine.fit import INITS
from dcliques_jax.paper import EXPERIMENTS, SCALES, report, run
from dcliques_jax.paper.settings import TASKS


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command. Returns 1 if a claim does not hold, 2 after an error, 130 after an interrupt."""
    requested = _parser().parse_args(arguments)
    try:
        return int(requested.command(requested))
    except KeyboardInterrupt:
        print("interrupted: pass --resume to continue", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dcliques_jax.paper", description="Runs the experiments of the D-Cliques paper."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("list", help="list all experiments")
    command.set_defaults(command=_list)
    command = commands.add_parser("run", help="run experiments, draw their figures and check their claims")
    command.add_argument("names", nargs="+", metavar="NAME", help="an experiment, or `all`")
    command.add_argument("--scale", choices=SCALES, default="quick", help="`full` is the paper's (default: quick)")
    command.add_argument("--seeds", type=int, default=1, metavar="K", help="number of seeds (default: 1)")
    command.add_argument("--first-seed", type=int, default=0, metavar="SEED", help="first seed (default: 0)")
    command.add_argument("--init", choices=INITS, default="shared", help="initial models (default: shared)")
    command.add_argument("--out", default="paper-results", metavar="DIR", help="output folder (default: paper-results)")
    command.add_argument("--resume", action="store_true", help="continue interrupted runs")
    command.add_argument("--until", type=int, metavar="EPOCH", help="stop at the first evaluation from this epoch on")
    command.add_argument(
        "--eval-every", type=int, metavar="EPOCHS", help="epochs between evaluations, whatever the scale"
    )
    command.add_argument("--eval-nodes", type=int, metavar="COUNT", help="number of nodes to evaluate")
    command.add_argument("--eval-examples", type=int, metavar="COUNT", help="number of test examples to evaluate on")
    command.set_defaults(command=_run)
    command = commands.add_parser("report", help="tell which claims hold for all runs of a folder")
    command.add_argument("out", metavar="DIR")
    command.set_defaults(command=_report)
    return parser


def _list(_: argparse.Namespace) -> int:
    for name, experiment in EXPERIMENTS.items():
        print(f"{name:<36}{experiment.figure:<24}{experiment.title}")
    return 0


def _run(requested: argparse.Namespace) -> int:
    given = {"eval_every": requested.eval_every, "eval_nodes": requested.eval_nodes}
    if requested.eval_examples is not None:
        given["eval_examples"] = dict.fromkeys(TASKS, requested.eval_examples)
    scale = SCALES[requested.scale]._replace(**{name: value for name, value in given.items() if value is not None})
    names = tuple(EXPERIMENTS) if requested.names == ["all"] else requested.names
    for name in names:  # check all names before a run of hours
        _checks.choice("NAME", name, tuple(EXPERIMENTS))
    broken = 0
    for name in names:
        options = {name: getattr(requested, name) for name in ("seeds", "first_seed", "init", "out", "resume", "until")}
        outcome = run(name, scale=scale, **options)
        print(f"{outcome}\n  written to {outcome.folder}\n", flush=True)
        broken |= any(verdict.holds is False for verdict in outcome.verdicts.values())
    return broken


def _report(requested: argparse.Namespace) -> int:
    outcomes = report(requested.out)
    print("\n\n".join(map(str, outcomes)))
    found = [verdict.words for outcome in outcomes for verdict in outcome.verdicts.values()]
    hold, not_, open_, missing = (found.count(words) for words in ("holds", "DOES NOT HOLD", "open", "cannot be told"))
    print(f"\n{hold} claims hold, {not_} do not, {open_} are open, {missing} cannot be told yet")
    return int(not_ > 0)


if __name__ == "__main__":
    sys.exit(main())
