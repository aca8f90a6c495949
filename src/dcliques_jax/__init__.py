"""D-Cliques and decentralised SGD, simulated for thousands of nodes as one JAX program."""

from dcliques_jax import (
    algorithms,
    augmentations,
    cliques,
    clocks,
    compressors,
    datasets,
    faults,
    features,
    layers,
    metrics,
    mixing,
    models,
    paper,
    partitions,
    plotting,
    reports,
    schedules,
    studies,
    topologies,
)
from dcliques_jax._engine.simulation import Simulation
from dcliques_jax._simulate import prepare, simulate
from dcliques_jax.datasets import Dataset
from dcliques_jax.partitions import PartitionedDataset
from dcliques_jax.results import History, Result
from dcliques_jax.topologies import Topology

__version__ = "0.1.0"

__all__ = [
    "Dataset",
    "History",
    "PartitionedDataset",
    "Result",
    "Simulation",
    "Topology",
    "algorithms",
    "augmentations",
    "cliques",
    "clocks",
    "compressors",
    "datasets",
    "faults",
    "features",
    "layers",
    "metrics",
    "mixing",
    "models",
    "paper",
    "partitions",
    "plotting",
    "prepare",
    "reports",
    "schedules",
    "simulate",
    "studies",
    "topologies",
]
