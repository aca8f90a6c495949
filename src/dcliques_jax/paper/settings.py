"""The setting of one curve of a figure, as a study of one case."""

from typing import Any, NamedTuple

from dcliques_jax._studies import file
from dcliques_jax._studies.file import Study

CLIQUE_SIZE = 10


class Task(NamedTuple):
    """A data set and the training settings of the paper."""

    title: str
    data: dict[str, Any]  # tables of a study
    model: dict[str, Any]
    learning_rate: float
    batch_size: int  # per node, for 100 nodes


TASKS = {
    "mnist": Task("MNIST", {"use": "mnist"}, {"use": "logistic_regression"}, 0.1, 128),
    "cifar10": Task("CIFAR-10", {"use": "cifar10"}, {"use": "gn_lenet"}, 0.002, 20),
}


class Setting(NamedTuple):
    """One curve. The defaults are those of most of the paper: D-Cliques of 100 nodes with two shards each.

    >>> Setting("mnist", momentum=0.9).name
    'mnist-shards-100-d-cliques-fully-connected-dsgd-momentum-0.9'
    """

    task: str  # "mnist" or "cifar10"
    topology: str = "d_cliques"  # or "ring", "grid", "fully_connected", "random_regular", "diverse_random"
    partition: str = "shards"  # or "iid", and with balanced classes "one_class" and "balanced_iid"
    num_nodes: int = 100
    inter: str = "fully_connected"  # wiring between cliques
    greedy_swap: bool = True  # False: random cliques
    removed_edges: int = 0  # per clique
    averaging: bool = False  # of gradients: Clique Averaging, or over diverse neighbours
    momentum: float = 0.0

    @property
    def name(self) -> str:
        """A unique name that is fit for a file."""
        return "-".join(self._labels())

    @property
    def batch_size(self) -> int:
        """Batch size per node. It shrinks with the number of nodes, so that epochs have the same number of rounds."""
        return max(1, round(TASKS[self.task].batch_size * 100 / self.num_nodes))

    def study(self, seeds: list[int], **simulate: Any) -> Study:
        """Returns a study of this setting alone. The other arguments are some of those of `simulate`."""
        task = TASKS[self.task]
        nodes, graph, method = self._labels()
        return file.parse(
            {
                "title": self.name,
                "num_nodes": self.num_nodes,
                "seeds": seeds,
                "data": task.data,
                "model": task.model,
                "simulate": {"batch_size": self.batch_size, **simulate},
                "partitions": {nodes: {"use": self.partition}},
                "topologies": {graph: self._topology()},
                "algorithms": {method: self._algorithm()},
            }
        )

    def _labels(self) -> tuple[str, str, str]:
        """Names the nodes with their data, the topology and the algorithm."""
        graph = [self.topology]
        if self.topology == "d_cliques":
            graph += [self.inter, *(["random-cliques"] * (not self.greedy_swap))]
        if self.removed_edges:
            graph.append(f"less-{self.removed_edges}-edges")
        method = ["dsgd"] + ["averaging"] * self.averaging + [f"momentum-{self.momentum:g}"] * (self.momentum > 0)
        nodes = [self.task, self.partition, str(self.num_nodes)]
        first, second, third = ("-".join(words).replace("_", "-") for words in (nodes, graph, method))
        return first, second, third

    def _algorithm(self) -> dict[str, Any]:
        optimizer: dict[str, Any] = {"use": "sgd", "learning_rate": TASKS[self.task].learning_rate}
        optimizer |= {"momentum": self.momentum} if self.momentum else {}
        return {"use": "dsgd", "optimizer": optimizer, "clique_averaging": self.averaging}

    def _topology(self) -> dict[str, Any]:
        table: dict[str, Any] = {"use": self.topology}
        if self.topology == "d_cliques":
            table |= self._cliques()
        elif self.topology == "grid":  # as square as the number of nodes allows
            rows = max(rows for rows in range(1, int(self.num_nodes**0.5) + 1) if self.num_nodes % rows == 0)
            table |= {"rows": rows, "columns": self.num_nodes // rows}
        elif self.topology in ("random_regular", "diverse_random"):
            table["degree"] = 10
        if self.removed_edges:
            return {"use": "remove_intra_clique_edges", "per_clique": self.removed_edges, "topology": table}
        return table

    def _cliques(self) -> dict[str, Any]:
        """Uses Greedy Swap or random cliques. For nodes of one class, uses ideal cliques as in appendix C."""
        if self.partition == "one_class" and self.greedy_swap:
            return {"inter": self.inter, "cliques": {"use": "ideal_cliques"}}
        steps = {} if self.greedy_swap else {"max_steps": 0}
        return {"inter": self.inter, "clique_size": min(CLIQUE_SIZE, self.num_nodes), **steps}
