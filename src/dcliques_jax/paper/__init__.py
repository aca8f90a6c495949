"""Every experiment of the paper by name, on real data, with its claims checked.

    python -m dcliques_jax.paper list
    python -m dcliques_jax.paper run iid-vs-skew --scale quick
    python -m dcliques_jax.paper report paper-results

In Python, call `dcliques_jax.paper.run("iid-vs-skew")`.
"""

from dcliques_jax.paper.experiments import EXPERIMENTS, Experiment, SkewExperiment
from dcliques_jax.paper.reports import Outcome, report, run
from dcliques_jax.paper.runs import SCALES, Scale
from dcliques_jax.paper.settings import Setting

__all__ = ["EXPERIMENTS", "SCALES", "Experiment", "Outcome", "Scale", "Setting", "SkewExperiment", "report", "run"]
