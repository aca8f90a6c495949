"""How long do whole runs take, from the call to the result?

M100 and M1000 as in `rounds.py` for 100 epochs of 4 rounds, all nodes evaluated on 10,000 test examples after every
epoch. A call before it, of one epoch, compiles.
"""

import workloads
from harness import Line, interleaved

import dcliques_jax as dc


def measure(quick):
    sizes = [("quick", 20, 40, 10, 50, 3)]
    if not quick:
        sizes = [("M100", 100, 500, 128, 10_000, 100), ("M1000", 1000, 50, 13, 10_000, 100)]
    for name, num_nodes, size, batch_size, num_test, epochs in sizes:
        data = workloads.images(num_nodes, size, (28, 28, 1), num_test)
        topology = workloads.d_cliques(data)

        def run(epochs, data=data, topology=topology, batch_size=batch_size):
            return dc.simulate(topology, data, epochs=epochs, batch_size=batch_size, **workloads.SILENT)

        (compiled,) = interleaved({"compiled": lambda run=run: run(1)}, 1, warm_up=0)["compiled"]
        (whole,) = interleaved({"whole": lambda run=run, epochs=epochs: run(epochs)}, 1, warm_up=0)["whole"]
        note = f"one epoch before it, compiling: {compiled:.1f} s"
        yield Line(f"a run of {epochs} epochs", name, "dcliques_jax", whole, whole, note=note)
