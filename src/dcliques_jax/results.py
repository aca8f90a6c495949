"""What a run leaves behind."""

import dataclasses
import json
import os
from typing import Any, NamedTuple

import jax
import numpy as np

from dcliques_jax import _files, _html
from dcliques_jax.topologies import Topology


class Record(NamedTuple):
    """What one evaluation measured; with `simulate(seeds=...)` the seeds come first."""

    round: int  # rounds run so far
    epoch: float  # the same in epochs
    accuracy: np.ndarray  # [eval_nodes] on the test examples, in 0 .. 1
    loss: np.ndarray  # [eval_nodes] mean test loss
    train_loss: np.ndarray  # [nodes] mean loss of the mini-batches since the last evaluation; NaN before training
    consensus_distance: np.ndarray  # [] sqrt( 1/n sum_i || theta_i - mean theta ||^2 ), over all nodes
    mean_model_accuracy: np.ndarray  # [] of the mean of all models, on the same test examples
    nodes_right: np.ndarray  # [eval_examples] how many of the evaluated nodes are right on each


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class History:
    """Measurements at each evaluation, the first of them before training. t counts evaluations.

    With `simulate(seeds=...)` all arrays but `round` and `epoch` have the seeds on their first axis.
    """

    round: np.ndarray  # [t] rounds run so far
    epoch: np.ndarray  # [t] the same in epochs
    accuracy: np.ndarray  # [t, eval_nodes] on the test examples, in 0 .. 1
    loss: np.ndarray  # [t, eval_nodes] mean test loss
    train_loss: np.ndarray  # [t, nodes] mean loss of the mini-batches since the last evaluation; NaN at t = 0
    consensus_distance: np.ndarray  # [t] sqrt( 1/n sum_i || theta_i - mean theta ||^2 ), over all nodes
    mean_model_accuracy: np.ndarray  # [t] of the mean of all models, on the same test examples
    nodes_right: np.ndarray  # [t, eval_examples] how many of the evaluated nodes are right on each
    eval_nodes: np.ndarray  # the nodes that were evaluated; all, unless simulate(eval_nodes=...) said otherwise
    eval_examples: np.ndarray  # the test examples they were evaluated on; all, likewise

    def __repr__(self) -> str:
        *seeds, evaluations, nodes = self.accuracy.shape
        several = "".join(f"seeds={count}, " for count in seeds)
        return (
            f"History({several}evaluations={evaluations}, rounds={self.round[-1]}, nodes={nodes}, "
            f"examples={self.eval_examples.shape[-1]})"
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Result:
    """What `simulate` returns. With `simulate(seeds=...)` parameters and state have the seeds on their first axis."""

    topology: Topology | list[Topology]  # a list if there was one
    history: History
    params: Any  # pytree of arrays [nodes, ...], the models of all nodes
    state: Any  # all that the next round would need; None if the result was loaded
    provenance: dict[str, Any]  # what it takes to check and to repeat the run, as plain values
    interrupted: bool = False  # whether Ctrl-C ended the run before its time

    def __repr__(self) -> str:
        history, several = self.history, "".join(f", seeds={count}" for count in self.history.accuracy.shape[:-2])
        accuracy = history.accuracy[..., -1, :]
        return (
            f"Result({self.provenance['topology']!r}, num_nodes={self.provenance['num_nodes']}{several}, "
            f"rounds={history.round[-1]}, accuracy={accuracy.mean():.4f} ({accuracy.min():.4f} to "
            f"{accuracy.max():.4f}))"
        )

    def __str__(self) -> str:
        lines = [f"  {name}: {_shown(value)}" for name, value in self.provenance.items() if value is not None]
        return "\n".join([repr(self), *lines])

    def _repr_html_(self) -> str:
        history, told = self.history, self.provenance
        accuracy, loss = history.accuracy[..., -1, :], history.loss[..., -1, :]
        measured = {
            "test accuracy": f"{accuracy.mean():.1%} ({_html.span(accuracy.min(), accuracy.max(), '.1%')} over nodes)",
            "test loss": f"{loss.mean():.3g} ({_html.span(loss.min(), loss.max(), '.3g')} over nodes)",
            "accuracy of the mean model": f"{history.mean_model_accuracy[..., -1].mean():.1%}",
            "consensus distance": f"{history.consensus_distance[..., -1].mean():.3g}",
        }
        seeds = {"seeds": f"{len(accuracy)}"} if accuracy.ndim == 2 else {}
        trained = {"nodes": f"{told['num_nodes']:,}", "rounds": f"{history.round[-1]:,} ({history.epoch[-1]:g} epochs)"}
        setting = {"data set": told.get("dataset"), "model": told.get("model")}
        known = {name: str(value) for name, value in setting.items() if value is not None}
        return _html.table(told["topology"], (known | trained | seeds | measured).items())

    def plot(self, ax: Any = None, *, label: str | None = None) -> Any:
        """Draws test accuracy over epochs as the paper does: mean over nodes bold, minimum and maximum thin."""
        from dcliques_jax import plotting

        return plotting.plot_accuracy({label or self.provenance["topology"]: self}, ax=ax)

    def to_pandas(self) -> Any:
        """One row for every seed, evaluation and evaluated node, as a pandas DataFrame."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("Result.to_pandas needs the package pandas: pip install pandas") from error
        history = self.history
        several = history.accuracy.ndim == 3
        accuracy = history.accuracy if several else history.accuracy[None]
        evaluated = history.eval_nodes if several else history.eval_nodes[None]  # [seeds, nodes]
        train_loss = history.train_loss.reshape(len(accuracy), len(history.round), -1)  # [seeds, t, nodes]
        columns = {
            "seed": np.reshape(self.provenance["seeds"], (-1, 1, 1)),
            "round": history.round[None, :, None],
            "epoch": history.epoch[None, :, None],
            "node": evaluated[:, None, :],
            "accuracy": accuracy,
            "loss": history.loss.reshape(accuracy.shape),
            "train_loss": np.take_along_axis(train_loss, evaluated[:, None], 2),
            "consensus_distance": history.consensus_distance.reshape(len(accuracy), -1, 1),
            "mean_model_accuracy": history.mean_model_accuracy.reshape(len(accuracy), -1, 1),
        }
        return pd.DataFrame({name: np.broadcast_to(values, accuracy.shape).ravel() for name, values in columns.items()})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes history, parameters, topology and provenance to one NumPy `.npz` file, whole or not at all.

        Arrays are named `history/...`, `params/...` (by their place in the pytree) and `topology/0/...`; `about` and
        `checksums` are JSON. `Result.load` reads them, and `numpy.load` without pickle. bfloat16 is saved as float32.
        """
        arrays = {f"history/{name}": np.asarray(value) for name, value in vars(self.history).items()}
        for place, leaf in jax.tree_util.tree_leaves_with_path(self.params):
            names = [jax.tree_util.keystr((part,), simple=True) for part in place]
            if any("/" in name for name in names):
                raise ValueError(f"parameters are saved by their names, in which '/' cannot stand: {names}")
            array = np.asarray(leaf)
            # NumPy's files know no bfloat16.
            arrays["/".join(["params", *names])] = array.astype(np.float32) if array.dtype.kind == "V" else array
        several = isinstance(self.topology, list)
        graphs = self.topology if isinstance(self.topology, list) else [self.topology]
        for number, graph in enumerate(graphs):
            for name in ("edges", "clique_ids", "gradient_edges"):
                if (array := getattr(graph, name)) is not None:
                    arrays[f"topology/{number}/{name}"] = array
        about = {"provenance": self.provenance, "topologies": [graph.name for graph in graphs], "several": several}
        about["interrupted"] = self.interrupted
        arrays["about"] = np.array(json.dumps(about))
        _files.write_arrays(path, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Result":
        """Reads what `save` wrote. Parameters come as nested dictionaries, named by their places; no state comes back.

        Nothing in the file can run code. A file that is not a saved result, or of which a bit has changed, is refused
        with a `ValueError`, as is one that holds more than the memory of this machine.
        """
        try:
            arrays = _files.read_arrays(path)
            about = json.loads(str(arrays.pop("about")))
            provenance, names = dict(about["provenance"]), list(about["topologies"])
            parts: dict[str, Any] = {}
            for name, array in arrays.items():
                *places, last = name.split("/")
                within = parts
                for place in places:
                    within = within.setdefault(place, {})
                within[last] = array
            graphs = [
                Topology(
                    num_nodes=int(provenance["num_nodes"]),
                    edges=parts["topology"][str(number)]["edges"],
                    clique_ids=parts["topology"][str(number)].get("clique_ids"),
                    gradient_edges=parts["topology"][str(number)].get("gradient_edges"),
                    name=str(name),
                )
                for number, name in enumerate(names)
            ]
            topology = graphs if about["several"] else graphs[0]
            history, interrupted = History(**parts["history"]), bool(about["interrupted"])
            return cls(topology, history, parts.get("params", {}), None, provenance, interrupted)
        except (FileNotFoundError, PermissionError, IsADirectoryError):
            raise
        except Exception as error:  # whatever NumPy, zipfile and json raise for files that are not theirs
            raise ValueError(f"{os.fspath(path)} is not what Result.save writes, or it is corrupt: {error}") from error


def _shown(value: Any) -> str:
    return ", ".join(f"{name} {entry}" for name, entry in value.items()) if isinstance(value, dict) else str(value)
