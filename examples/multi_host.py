"""One run on several hosts: every host starts this script, and JAX links them.

Two hosts (the first one's address must be reachable from the second):

    host-a$ python examples/multi_host.py --coordinator host-a:1234 --processes 2 --process 0
    host-b$ python examples/multi_host.py --coordinator host-a:1234 --processes 2 --process 1

SLURM, one task per node; JAX finds the others by itself:

    srun --nodes=2 --ntasks-per-node=1 --gpus-per-task=4 python examples/multi_host.py

A slice of a TPU pod, on all of its hosts at once:

    gcloud compute tpus tpu-vm ssh my-slice --worker=all --command="python examples/multi_host.py"

Without a cluster, two processes of one machine, with two devices each:

    export XLA_FLAGS=--xla_force_host_platform_device_count=2
    python examples/multi_host.py --coordinator localhost:1234 --processes 2 --process 0 &
    python examples/multi_host.py --coordinator localhost:1234 --processes 2 --process 1

With --checkpoints on a file system that all hosts share, the same command resumes after an interruption, also on
another number of hosts or devices.
"""

import argparse

import jax
import numpy as np
import optax

import dcliques_jax as dc


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0; found by itself on SLURM and TPUs")
    parser.add_argument("--processes", type=int, help="1 for a single process without a coordinator")
    parser.add_argument("--process", type=int)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--checkpoints", metavar="FOLDER")
    parser.add_argument("--save", metavar="FILE", help="where to write the result")
    asked = parser.parse_args()

    if asked.processes != 1:
        # A process that is gone for half a minute ends the others with an error.
        jax.distributed.initialize(asked.coordinator, asked.processes, asked.process, heartbeat_timeout_seconds=30)
    mesh = jax.make_mesh((jax.device_count(),), ("nodes",))

    # All processes build the same data and topology from the same seeds; each keeps what its devices need.
    dataset = dc.datasets.synthetic(num_train=20 * asked.nodes, num_test=200)
    data = dc.partitions.shards(dataset, asked.nodes)
    topology = dc.topologies.d_cliques(data.label_distribution, inter="small_world")
    parameters = dc.models.num_parameters(dc.models.logistic_regression(), dataset.train_inputs[:1])
    first = jax.process_index() == 0
    if first:
        print(topology.report(num_parameters=parameters, num_devices=mesh.size), flush=True)
    result = dc.simulate(
        topology,
        data,
        algorithm=dc.algorithms.dsgd(optax.sgd(0.1, momentum=0.9)),
        epochs=asked.epochs,
        mesh=mesh,
        checkpoint_dir=asked.checkpoints,
        on_evaluation=lambda record: (
            print(f"epoch {record.epoch:g}: {np.mean(record.accuracy):.4f}", flush=True) if first else None
        ),
    )
    if first and asked.save:
        result.save(asked.save)


if __name__ == "__main__":
    main()
