"""Results of runs."""

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dcliques_jax import _html
from dcliques_jax._store import arrays_by_name, files
from dcliques_jax.algorithms import Traffic
from dcliques_jax.clocks import Clock
from dcliques_jax.topologies import Topology


class State(NamedTuple):
    """The state of a run between two rounds. `simulate(init=...)` continues the run and its random streams.

    With `simulate(seeds=...)` every array has the seeds on its first axis.
    """

    params: Any  # parameters, [nodes, ...] in every leaf
    algorithm: Any  # state of the algorithm, [nodes, ...] or [] in every leaf
    round: Any  # [] number of rounds so far
    key: Any  # [2] data of the random key for the order of examples and the draws of algorithms and faults
    faults: Any = None  # state of the faults, [nodes, ...] in every leaf; None without faults
    model: Any = ()  # state of the models, such as batch statistics, [nodes, ...] in every leaf


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Measured:
    """The measurements of every evaluation. Records, histories, checkpoints and tables follow this list.

    - `accuracy`, `[eval_nodes]`: accuracy of each node on the evaluated examples, from 0 to 1. In data sets of
      sequences, accuracies and losses are means over positions; if real numbers are predicted, accuracies are NaN.
    - `loss`, `[eval_nodes]`: mean loss of each node on the evaluated examples.
    - `local_accuracy`, `[eval_nodes]`: accuracy of each node on its own test examples, those of
      `PartitionedDataset.test_indices` among the evaluated ones; NaN without them.
    - `train_loss`, `[nodes]`: mean training loss of each node since the last evaluation; NaN before training.
    - `consensus_distance`, `[]`: `sqrt( 1/n sum_i || theta_i - mean theta ||^2 )`, over all nodes.
    - `mean_model_accuracy`, `[]`: accuracy of the mean of all models on the evaluated examples.
    - `mean_model_loss`, `[]`: its mean loss on the same examples.
    - `messages`, `[]`: messages sent per node since the start of this call of `simulate`, as a mean over nodes; NaN if
      the algorithm does not say. Messages that are lost or sent to offline nodes count. Offline nodes send none.
    - `messages_lost`, `[]`: those of them that did not arrive.
    - `bytes`, `[]`: size of the messages sent per node, counted like `messages`.
    - `nodes_online`, `[]`: mean number of nodes that took part in the rounds since the last evaluation; at first NaN.
    - `nodes_right`, `[eval_examples]`: number of evaluated nodes that predict each example correctly, in sequences all
      its positions; 0 if real numbers are predicted.
    - `extra`: the metrics of `simulate(metrics=...)`, by name.
    """

    accuracy: np.ndarray = dataclasses.field(metadata={"axes": ("eval_nodes",)})
    loss: np.ndarray = dataclasses.field(metadata={"axes": ("eval_nodes",)})
    local_accuracy: np.ndarray = dataclasses.field(metadata={"axes": ("eval_nodes",)})
    train_loss: np.ndarray = dataclasses.field(metadata={"axes": ("nodes",)})
    consensus_distance: np.ndarray = dataclasses.field(metadata={"axes": ()})
    mean_model_accuracy: np.ndarray = dataclasses.field(metadata={"axes": ()})
    mean_model_loss: np.ndarray = dataclasses.field(metadata={"axes": ()})
    messages: np.ndarray = dataclasses.field(metadata={"axes": ()})
    messages_lost: np.ndarray = dataclasses.field(metadata={"axes": ()})
    bytes: np.ndarray = dataclasses.field(metadata={"axes": ()})
    nodes_online: np.ndarray = dataclasses.field(metadata={"axes": ()})
    nodes_right: np.ndarray = dataclasses.field(metadata={"axes": ("eval_examples",)})
    extra: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


MEASURED: dict[str, tuple[str, ...]] = {
    field.name: field.metadata["axes"] for field in dataclasses.fields(Measured) if field.metadata
}
"""The names of the measurements of every run, and their axes."""

_COSTS = ("messages", "messages_lost", "bytes")  # of which less is better


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Record(Measured):
    """One evaluation, with the fields of `Measured`. With `simulate(seeds=...)` arrays have the seeds on axis 0."""

    round: int  # number of rounds so far
    epoch: float  # number of epochs so far
    models: Callable[[], Any] | None = None  # returns `params`; None if the record comes from a checkpoint

    def params(self) -> Any:
        """Returns a copy of the models of all nodes, a pytree of arrays `[nodes, ...]`.

        Raises a `ValueError` if the run has gone on, or if the record was restored from a checkpoint.
        """
        if self.models is None:
            raise ValueError(
                f"the models of round {self.round} are gone: this record was restored from a checkpoint. Skip records "
                "whose `models` is None"
            )
        return self.models()

    def __repr__(self) -> str:
        return f"Record(round={self.round}, {_summary(self.accuracy, self.loss)})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class History(Measured):
    """All evaluations t of a run, with the fields of `Measured`. The first evaluation, t = 0, is before training.

    These fields have t on their first axis: `accuracy` is `[t, eval_nodes]`, and `extra["name"]` is
    `[t, eval_nodes, ...]`, or `[t, ...]` for `metrics.of_mean_model`. `simulate(seeds=...)` adds the seeds as the first
    axis of all arrays but `round` and `epoch`.
    """

    round: np.ndarray  # [t] number of rounds so far
    epoch: np.ndarray  # [t] number of epochs so far
    eval_nodes: np.ndarray  # the evaluated nodes; all nodes unless simulate(eval_nodes=...) is given
    eval_examples: np.ndarray  # the evaluated examples; all unless simulate(eval_examples=...) is given

    def __repr__(self) -> str:
        *seeds, evaluations, nodes = self.accuracy.shape
        several = "".join(f"runs={count}, " for count in [" x ".join(map(str, seeds))] if seeds)
        return (
            f"History({several}evaluations={evaluations}, rounds={self.round[-1]}, nodes={nodes}, "
            f"examples={self.eval_examples.shape[-1]})"
        )


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Result:
    """The result of `simulate`. With `simulate(seeds=...)` parameters and state have the seeds on their first axis."""

    topology: Topology | list[Topology]  # the topology, or a list with one topology per seed
    history: History  # the measurements of all evaluations
    params: Any  # models of all nodes after training, a pytree of arrays [nodes, ...]
    state: State | None  # the state after the last round; None if the result was loaded from a file without it
    provenance: dict[str, Any]  # plain values that identify the run, to check and repeat it
    interrupted: bool = False  # whether Ctrl-C stopped the run early
    traffic: Sequence[Traffic] = ()  # what nodes send in rounds without faults, one per run; empty if unknown
    model_state: Any = ()  # state of the models after training, such as batch statistics, [nodes, ...] in every leaf

    def __repr__(self) -> str:
        history = self.history
        several = "".join(
            f", {name}={count}" for name, count in zip(self._axes(), history.accuracy.shape, strict=False)
        )
        return (
            f"Result({self.provenance['topology']!r}, num_nodes={self.provenance['num_nodes']}{several}, "
            f"rounds={history.round[-1]}, {_summary(history.accuracy[..., -1, :], history.loss[..., -1, :])})"
        )

    def __str__(self) -> str:
        lines = [f"  {name}: {_shown(value)}" for name, value in self.provenance.items() if value is not None]
        return "\n".join([repr(self), *lines])

    def _repr_html_(self) -> str:
        history, told = self.history, self.provenance
        accuracy, loss = history.accuracy[..., -1, :], history.loss[..., -1, :]
        examples = told["evaluate_on"]
        measured = {
            f"{examples} loss": f"{loss.mean():.3g} ({_html.span(loss.min(), loss.max(), '.3g')} over nodes)",
            "consensus distance": f"{history.consensus_distance[..., -1].mean():.3g}",
        }
        if not np.isnan(accuracy).all():
            spread = _html.span(accuracy.min(), accuracy.max(), ".1%")
            measured = {
                f"{examples} accuracy": f"{accuracy.mean():.1%} ({spread} over nodes)",
                "accuracy of the mean model": f"{history.mean_model_accuracy[..., -1].mean():.1%}",
            } | measured
        seeds = {name: f"{count}" for name, count in zip(self._axes(), accuracy.shape[:-1], strict=True)}
        trained = {"nodes": f"{told['num_nodes']:,}", "rounds": f"{history.round[-1]:,} ({history.epoch[-1]:g} epochs)"}
        setting = {"data set": told.get("dataset"), "model": told.get("model")}
        known = {name: str(value) for name, value in setting.items() if value is not None}
        return _html.table(told["topology"], (known | trained | seeds | measured).items())

    def seconds(self, clock: Clock) -> np.ndarray:
        """Returns how long the rounds up to each evaluation would take in a network, `[t]`, after seeds if any.

        Rounds count as if nothing failed.

        Args:
          clock: one of `dcliques_jax.clocks`.

        >>> from dcliques_jax import clocks, datasets, partitions, simulate, topologies
        >>> data = partitions.shards(datasets.synthetic(), 10)
        >>> simulate(topologies.ring(10), data, epochs=1, progress=False).seconds(clocks.WAN).round(4)
        array([0.    , 0.2022])
        """
        if not isinstance(clock, Clock):
            raise ValueError(f"clock={clock!r} is not a clock: pass for example clocks.WAN")
        if not self.traffic:
            raise ValueError("the algorithm of this result does not tell what it sends: give it Traits(sends=...)")
        return np.stack([self._seconds(clock, traffic) for traffic in self.traffic]).reshape(
            self.history.messages.shape
        )

    def _seconds(self, clock: Clock, traffic: Traffic) -> np.ndarray:
        received = traffic.bytes if traffic.received is None else traffic.received
        phases = np.ones(len(traffic.bytes)) if traffic.phases is None else traffic.phases
        turns = clock.seconds(traffic.bytes, received, phases)
        first, last = self.history.round[[0, -1]]
        until = np.concatenate([[0.0], np.cumsum(turns[np.arange(first, last) % len(turns)])])
        return np.asarray(until[self.history.round - first])

    def plot(self, ax: Any = None, *, label: str | None = None, x: str = "epoch", clock: Clock | None = None) -> Any:
        """Plots accuracy over epochs as in the paper: the mean over nodes bold, the minimum and maximum thin.

        If real numbers are predicted, it plots losses.

        Args:
          ax: matplotlib axes to draw on. Default: new axes.
          label: name in the legend. Default: the name of the topology.
          x: what to plot over: `"epoch"`, `"round"`, `"messages"` or `"bytes"` per node, or `"seconds"` by a clock.
          clock: one of `dcliques_jax.clocks`, for `x="seconds"`.
        """
        from dcliques_jax import plotting

        name = label or self.provenance["topology"]
        curves = {f"{name}, {_shown(values)}": self.at(**values) for values in self.combinations()} or {name: self}
        draw = plotting.plot_loss if np.isnan(self.history.accuracy).all() else plotting.plot_accuracy
        return draw(curves, ax=ax, x=x, clock=clock)

    def at(self, **values: float) -> "Result":
        """Returns the result of one combination of a sweep.

        Args:
          **values: the value of every argument in the sweep.

        >>> import optax
        >>> import dcliques_jax as dc
        >>> data = dc.partitions.shards(dc.datasets.synthetic(), 10)
        >>> rates = {"learning_rate": [0.03, 0.1]}
        >>> factory = lambda learning_rate: dc.algorithms.dsgd(optax.sgd(learning_rate))
        >>> result = dc.simulate(
        ...     dc.topologies.ring(10), data, algorithm=factory, sweep=rates, epochs=2, seeds=[0, 1, 2], progress=False
        ... )
        >>> result.history.accuracy.shape, result.at(learning_rate=0.1).history.accuracy.shape
        ((2, 3, 3, 10), (3, 3, 10))
        >>> result.best().provenance["sweep"]
        {'learning_rate': 0.1}
        """
        if values not in self.combinations():
            raise ValueError(f"{values} is not a combination of the sweep {self.provenance.get('sweep')}")
        number, seeds = self.combinations().index(values), len(self.provenance["seeds"])
        index = np.unravel_index(number, self._sweep_shape())
        unmoved = ("round", "epoch", "extra")
        fields = {name: value if name in unmoved else value[index] for name, value in vars(self.history).items()}
        fields["extra"] = {name: value[index] for name, value in self.history.extra.items()}
        parts = jax.tree.map(lambda leaf: leaf[index], (self.params, self.state, self.model_state))
        changed: dict[str, Any] = dict(zip(("params", "state", "model_state"), parts, strict=True))
        changed["history"] = History(**fields)
        changed["traffic"] = self.traffic[number * seeds : (number + 1) * seeds]
        about = self.provenance | {"sweep": values}
        if isinstance(about["algorithm"], list):  # older files tell the algorithm of the first combination
            about["algorithm"] = about["algorithm"][number]
        return dataclasses.replace(self, provenance=about, **changed)

    def best(self, metric: str | None = None, *, largest: bool | None = None) -> "Result":
        """Returns the result of the best combination of a sweep by the last evaluation, the mean over nodes and seeds.

        Combinations that diverged are never best.

        Args:
          metric: name of a measurement in `history` or `history.extra`. Default: `"accuracy"`, or `"loss"` if there is
            none.
          largest: whether larger is better. Default: unless the name ends in "loss" or "distance", or is "messages",
            "messages_lost" or "bytes".
        """
        history = self.history
        if not self.combinations():
            raise ValueError("best chooses a combination of a sweep: pass simulate(sweep=...)")
        if metric is None:
            metric = "loss" if np.isnan(history.accuracy).all() else "accuracy"
        if metric not in MEASURED and metric not in history.extra:
            raise ValueError(f"metric={metric!r} is unknown: choose one of {', '.join([*MEASURED, *history.extra])}")
        measured = history.extra[metric] if metric in history.extra else getattr(history, metric)
        lead = len(self._axes())
        last = np.take(measured, -1, axis=lead).reshape(*self._sweep_shape(), -1).astype(np.float64)
        if largest is None:
            largest = not metric.endswith(("loss", "distance")) and metric not in _COSTS
        finite = ~self.diverged()
        if not finite.any():
            raise ValueError(f"all combinations of {self.provenance['sweep']} diverged: try smaller values")
        known = ~np.isnan(last[finite]).all(axis=0)  # offline nodes, classes that no example has, ... are NaN in all
        scores = np.where(known, last, 0).sum(axis=-1) / max(1, known.sum())
        finite &= np.isfinite(scores) & known.any()
        if not finite.any():
            raise ValueError(f"metric={metric!r} was not measured: it is infinite or NaN in all combinations")
        ranked = np.where(finite, scores if largest else -scores, -np.inf)
        return self.at(**self.combinations()[int(ranked.argmax())])

    def diverged(self) -> np.ndarray:
        """Returns whether a loss or the model of any node became infinite or NaN, for each combination."""
        # Losses are those of evaluated nodes, the consensus distance is that of all.
        measured = (self.history.loss, self.history.consensus_distance)
        each = [np.isfinite(values).reshape(*self._sweep_shape(), -1).all(axis=-1) for values in measured]
        return ~np.logical_and(*each)

    def combinations(self) -> list[dict[str, float]]:
        """Returns all combinations of a sweep; none if there is no sweep, or one was chosen."""
        sweep = self.provenance.get("sweep") or {}
        if not all(isinstance(values, list) for values in sweep.values()):
            return []
        return [dict(zip(sweep, each, strict=True)) for each in itertools.product(*sweep.values())] if sweep else []

    def _sweep_shape(self) -> tuple[int, ...]:
        return tuple(map(len, self.provenance["sweep"].values())) if self.combinations() else ()

    def _axes(self) -> list[str]:
        """Returns the names of the axes before t."""
        names = list(self.provenance["sweep"]) if self.combinations() else []
        return names + ["seeds"] * (self.history.accuracy.ndim - 2 - len(names))

    def to_pandas(self) -> Any:
        """Returns a pandas DataFrame with one row per seed, evaluation and evaluated node.

        After a sweep there are such rows for every combination, with a column for each argument.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ImportError("Result.to_pandas needs the package pandas: pip install pandas") from error
        if combinations := self.combinations():
            return pd.concat([self.at(**each).to_pandas().assign(**each) for each in combinations], ignore_index=True)
        history = self.history
        several = history.accuracy.ndim == 3
        accuracy = history.accuracy if several else history.accuracy[None]
        evaluated = history.eval_nodes if several else history.eval_nodes[None]  # [seeds, nodes]
        shape = accuracy.shape
        columns: dict[str, Any] = {
            "seed": np.reshape(self.provenance["seeds"], (-1, 1, 1)),
            "round": history.round[None, :, None],
            "epoch": history.epoch[None, :, None],
            "node": evaluated[:, None, :],
        }
        for name, axes in MEASURED.items():
            values = getattr(history, name).reshape(*shape[:2], -1)
            if axes == ("nodes",):
                values = np.take_along_axis(values, evaluated[:, None], 2)
            if axes != ("eval_examples",):
                columns[name] = values
        for name, values in history.extra.items():
            nodes = shape[2] if self.provenance["metrics"][name] == "nodes" else 1
            columns |= by_entry(name, values.reshape(*shape[:2], nodes, -1))
        return pd.DataFrame({name: np.broadcast_to(values, shape).ravel() for name, values in columns.items()})

    def save(self, path: str | os.PathLike[str], *, state: bool = False) -> None:
        """Writes history, parameters, topology and provenance to a NumPy `.npz` file. A failed write changes nothing.

        Arrays are named `history/...`, `params/...` and `model_state/...` (by their path in the pytree) and
        `topology/0/...`; `about` and `checksums` are JSON. `Result.load` reads the file, and so does `numpy.load`
        without pickle. bfloat16 is saved as float32.

        Args:
          path: path of the file.
          state: whether to save the state of the algorithm as well, so that `simulate(init=...)` can continue the run.
        """
        arrays = {f"history/{name}": np.asarray(value) for name, value in vars(self.history).items() if name != "extra"}
        arrays |= {f"history/extra/{name}": np.asarray(value) for name, value in self.history.extra.items()}
        arrays |= arrays_by_name.by_name("params", self.params)
        arrays |= arrays_by_name.by_name("model_state", self.model_state)
        if state:
            if self.state is None:
                raise ValueError("this result was loaded from a file without state: pass state=False")
            rest = self.state._asdict()
            del rest["params"], rest["model"]
            arrays |= arrays_by_name.by_name("state", rest)
        several = isinstance(self.topology, list)
        graphs = self.topology if isinstance(self.topology, list) else [self.topology]
        for number, graph in enumerate(graphs):
            arrays |= {
                f"topology/{number}/{name}": array for name, array in arrays_by_name.topology_arrays(graph).items()
            }
        for number, traffic in enumerate(self.traffic):
            arrays |= {f"traffic/{number}/{name}": a for name, a in traffic._asdict().items() if a is not None}
        about = {"provenance": self.provenance, "topologies": [graph.name for graph in graphs], "several": several}
        about["interrupted"] = self.interrupted
        arrays["about"] = np.array(json.dumps(about))
        files.write_arrays(path, arrays)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Result":
        """Reads a file that `save` wrote. Parameters and state become nested dictionaries, keyed by pytree path.

        Loading cannot run code. A file that is not a saved result, has changed by a bit, or exceeds the memory of this
        machine raises a `ValueError`.

        Args:
          path: path of the file.
        """
        try:
            arrays = files.read_arrays(path)
            about = json.loads(str(arrays.pop("about")))
            parts = arrays_by_name.nested(arrays)
            provenance = dict(about["provenance"])
            graphs = [
                arrays_by_name.topology_of(parts["topology"][str(number)], int(provenance["num_nodes"]), str(name))
                for number, name in enumerate(about["topologies"])
            ]
            params, model_state, state = parts.get("params", {}), parts.get("model_state", {}), None
            if "state" in parts:
                rest = {"algorithm": {}, "faults": None} | parts["state"]
                state = State(params=params, model=model_state, **rest)
            topology = graphs if about["several"] else graphs[0]
            sent = parts.get("traffic", {})
            traffic = [Traffic(**sent[str(number)]) for number in range(len(sent))]
            interrupted = bool(about["interrupted"])
            history = History(**parts["history"])
            return cls(topology, history, params, state, provenance, interrupted, traffic, model_state)
        except (FileNotFoundError, PermissionError, IsADirectoryError):
            raise
        except Exception as error:  # NumPy, zipfile and json raise many kinds for invalid files
            raise ValueError(f"{os.fspath(path)} is not what Result.save writes, or it is corrupt: {error}") from error


def _summary(accuracy: np.ndarray, loss: np.ndarray) -> str:
    """Summarises the accuracies of all nodes, or their losses if there are no accuracies."""
    name, values = ("loss", loss) if np.isnan(accuracy).all() else ("accuracy", accuracy)
    return f"{name}={values.mean():.4f} ({values.min():.4f} to {values.max():.4f})"


def by_entry(name: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """Splits a metric `[seeds, t, nodes, entries]` into table columns, one per entry."""
    if values.shape[3] == 1:
        return {name: values[..., 0]}
    return {f"{name}_{entry}": values[..., entry] for entry in range(values.shape[3])}


def _shown(value: Any) -> str:
    return ", ".join(f"{name} {entry}" for name, entry in value.items()) if isinstance(value, dict) else str(value)
