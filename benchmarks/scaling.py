"""Does the time of a round grow with the number of nodes, and no faster? What do devices do and tell each other?

Logistic regression of MNIST shape, batches of 14 images, all that a node has, D-Cliques joined as a small world.

Nodes: 100 to 100,000 on one device; times are those of one node in one round. 100,000 nodes take some 18 GB.

Devices: 1 to 8, which are threads of one machine here, so that none is faster for it. What counts is the work of each,
its nodes and its memory, and the bytes that each sends. Several devices need a process of their own:

    python benchmarks/scaling.py --devices 8        # prints what the devices of a round do
    python benchmarks/scaling.py --plot FOLDER      # draws FOLDER/results.json
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

import optax
import workloads
from harness import Line, per_round

SIZE = 14  # images of a node


def small_world(num_nodes):
    data = workloads.images(num_nodes, SIZE, (28, 28, 1))
    return workloads.d_cliques(data, "small_world"), data


def measure(quick):
    sizes = [20, 40] if quick else [100, 300, 1000, 3000, 10_000, 30_000, 100_000]
    found = {}
    for num_nodes in sizes:
        rounds = workloads.rounds(*small_world(num_nodes), SIZE, optax.sgd(0.1))
        repeats, count = (1, 2) if quick else (5, 20) if num_nodes < 1000 else (5, 4) if num_nodes < 30_000 else (3, 2)
        ((best, median),) = per_round({"run": rounds.run}, repeats, count).values()
        found[num_nodes] = best / num_nodes, median / num_nodes
        del rounds  # room for the next
    reference = found.get(1000, found[sizes[0]])[0]
    against = ("1000 nodes" if 1000 in found else f"{sizes[0]} nodes", reference, ">= 0.67")
    for num_nodes, times in found.items():
        yield Line("a node's share of a round", f"{num_nodes} nodes", "dcliques_jax", *times, *against)

    num_nodes = 40 if quick else 1000
    for count in (2,) if quick else (1, 2, 4, 8):
        devices = in_a_process(num_nodes, count)
        note = f"{devices['nodes']} nodes at most"
        workload = f"{num_nodes} nodes on {count} devices"
        sent, held = devices["sent"], devices["memory"]
        yield Line("memory of a device", workload, "dcliques_jax", held, held, note=note, unit="B")
        yield Line("what a device sends in a round", workload, "dcliques_jax", sent, sent, unit="B")


def in_a_process(num_nodes, count):
    """What the devices of a round do, found in a process that has as many."""
    command = [sys.executable, __file__, "--devices", str(count), "--nodes", str(num_nodes)]
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count}", "JAX_PLATFORMS": "cpu"}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return json.loads(told.splitlines()[-1])


def on_devices(num_nodes, count):
    """Places, bytes of memory and bytes sent of one device in one round."""
    import jax

    topology, data = small_world(num_nodes)
    mesh = jax.make_mesh((count,), ("nodes",))
    rounds = workloads.rounds(topology, data, SIZE, optax.sgd(0.1), mesh=mesh)
    report = topology.report(num_parameters=7850, num_devices=count)
    return {
        "nodes": rounds.layout.placements[0].per_device,
        "memory": rounds.memory(),
        "sent": report.bytes_between_devices / count,
    }


def plot(folder):
    """Time of a round over the number of nodes, beside the line on which it is proportional."""
    import matplotlib.pyplot as plt

    lines = json.loads((folder / "results.json").read_text())["lines"]
    shares = {
        int(line["workload"].split()[0]): line["best"] for line in lines if "share of a round" in line["question"]
    }
    nodes = sorted(shares)
    figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    ax.loglog(nodes, [n * shares[n] for n in nodes], "o-", color="#0072B2", label="measured")
    ax.loglog(nodes, [n * shares[1000] for n in nodes], "--", color="#999999", label="in proportion to 1000 nodes")
    ax.set(xlabel="nodes", ylabel="seconds a round")
    ax.grid(alpha=0.25, which="both")
    ax.legend()
    figure.savefig(folder / "scaling.png", dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--plot", type=pathlib.Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.plot:
        plot(options.plot)
    else:
        print(json.dumps(on_devices(options.nodes, options.devices)))
