"""What a run leaves behind."""

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax
import numpy as np

from dcliques_jax.topologies import Topology


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class History:
    """Measurements at each evaluation, the first of them before training. t counts evaluations."""

    round: np.ndarray  # [t] rounds run so far
    epoch: np.ndarray  # [t] the same in epochs
    accuracy: np.ndarray  # [t, eval_nodes] on the test examples, in 0 .. 1
    loss: np.ndarray  # [t, eval_nodes] mean test loss
    train_loss: np.ndarray  # [t, nodes] mean loss of the mini-batches since the last evaluation; NaN at t = 0
    consensus_distance: np.ndarray  # [t] sqrt( 1/n sum_i || theta_i - mean theta ||^2 ), over all nodes
    eval_nodes: np.ndarray  # the nodes that were evaluated; all, unless simulate(eval_nodes=...) said otherwise
    eval_examples: np.ndarray  # the test examples they were evaluated on; all, likewise

    def __repr__(self) -> str:
        evaluations, nodes = self.accuracy.shape
        return (
            f"History(evaluations={evaluations}, rounds={self.round[-1]}, nodes={nodes}, "
            f"examples={len(self.eval_examples)})"
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Result:
    """What `simulate` returns."""

    topology: Topology
    history: History
    params: Any  # pytree of arrays [nodes, ...], the models of all nodes
    state: Any  # all that the next round would need
    settings: dict[str, Any]  # the arguments of the run, as far as they are plain values

    def __repr__(self) -> str:
        accuracy = self.history.accuracy[-1]
        return (
            f"Result({self.topology.name!r}, num_nodes={self.topology.num_nodes}, rounds={self.history.round[-1]}, "
            f"accuracy={accuracy.mean():.4f} ({accuracy.min():.4f} to {accuracy.max():.4f}))"
        )

    def plot(self, ax: Any = None, *, label: str | None = None) -> Any:
        """Draws test accuracy over epochs as the paper does: mean over nodes bold, minimum and maximum thin."""
        from dcliques_jax import plotting

        return plotting.plot_accuracy({label or self.topology.name: self}, ax=ax)

    def to_pandas(self) -> Any:
        """One row for every evaluation and evaluated node, as a pandas DataFrame."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("Result.to_pandas needs the package pandas: pip install pandas") from error
        history = self.history
        evaluations, nodes = history.accuracy.shape
        return pd.DataFrame(
            {
                "round": np.repeat(history.round, nodes),
                "epoch": np.repeat(history.epoch, nodes),
                "node": np.tile(history.eval_nodes, evaluations),
                "accuracy": history.accuracy.ravel(),
                "loss": history.loss.ravel(),
                "train_loss": history.train_loss[:, history.eval_nodes].ravel(),
                "consensus_distance": np.repeat(history.consensus_distance, nodes),
            }
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes history, parameters, topology and settings to one NumPy `.npz` file, whole or not at all.

        Arrays are named `history/...`, `params/...` (by their place in the pytree) and `topology/...`; `settings` is a
        JSON text. `numpy.load` reads them without pickle.
        """
        arrays = {f"history/{name}": value for name, value in vars(self.history).items()}
        for place, leaf in jax.tree_util.tree_leaves_with_path(self.params):
            arrays[f"params/{jax.tree_util.keystr(place, simple=True, separator='/')}"] = np.asarray(leaf)
        for name in ("edges", "clique_ids", "gradient_edges"):
            if (array := getattr(self.topology, name)) is not None:
                arrays[f"topology/{name}"] = array
        arrays["settings"] = np.array(json.dumps({"topology": self.topology.name, **self.settings}))
        target = pathlib.Path(path)
        unfinished = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with unfinished.open("wb") as file:
                np.savez_compressed(file, **arrays)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
