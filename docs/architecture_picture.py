"""Draws the picture of the page on architecture: `python docs/architecture_picture.py`."""

import pathlib

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

PLAIN, YOURS, FRAME = "#eef1f4", "#ffe3b8", "#5b6b7b"

figure, ax = plt.subplots(figsize=(11, 7.6))
figure.subplots_adjust(0, 0, 1, 1)
ax.set(xlim=(0, 110), ylim=(0, 76), aspect="equal")
ax.axis("off")


def box(x, y, title, note="", yours="", width=15.5, height=7.5):
    """A box whose left lower corner is at x and y; an orange one shows what you may replace."""
    colour = YOURS if yours else PLAIN
    ax.add_patch(FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=1", fc=colour, ec=FRAME, lw=0.9))
    middle = x + width / 2
    ax.text(middle, y + height - 2.3, title, ha="center", va="center", fontsize=9.5, weight="bold")
    ax.text(middle, y + height - 5.2, note, ha="center", va="center", fontsize=8)
    if yours:
        ax.text(middle, y - 1.5, yours, ha="center", va="center", fontsize=7.5, color="#9a5b00", style="italic")


def frame(x, y, width, height, title, style="-"):
    patch = FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=1", fc="none", ec=FRAME, lw=1.3, ls=style)
    ax.add_patch(patch)
    ax.text(x + 1.2, y + height - 1.9, title, va="center", fontsize=9.5, color="#33414e")


def arrow(*points):
    """A line through points that ends in an arrowhead."""
    ax.plot(*zip(*points, strict=True), color=FRAME, lw=1.2)
    ax.annotate("", points[-1], points[-2], arrowprops={"arrowstyle": "-|>", "color": FRAME, "lw": 1.2, "shrinkB": 0})


# On the host, once.
ax.text(1, 74.2, "On the host, once (NumPy and SciPy, integer seeds)", fontsize=9.5, color="#33414e", va="center")
host = [
    ("Dataset", "examples, labels", "datasets.from_arrays"),
    ("Partition", "who holds what", "partitions.from_indices"),
    ("Cliques", "from [nodes, classes]", "any clique_ids"),
    ("Topology", "who talks to whom", "topologies.from_edges"),
    ("Network", "gossip W, gradients G", "your own weights"),
]
for number, (title, note, yours) in enumerate(host):
    box(2 + 22 * number, 63.5, title, note, yours, width=18)
    if number:
        arrow((22 * number - 2, 67.2), (22 * number + 2, 67.2))

# The two levels.
frame(2, 2, 106, 54, "simulate(topology, dataset, ...): the loop, checkpoints, callbacks, progress")
frame(5, 19, 100, 32, "prepare(...) -> Simulation: .run(rounds)   .evaluate()   .state   .params   .round", style="--")
arrow((99, 61), (99, 56.2))
arrow((33, 61), (33, 56.2))

# A round.
ax.text(6.5, 46, "run: all rounds up to the next evaluation are one XLA program", fontsize=8.5, va="center")
steps = [
    ("Batches", "a row per node", ""),
    ("Gradients", "vmap over nodes", "model, loss_fn"),
    ("Mix with G", "mix(G_t, gradients)", " "),
    ("Update", "optax, per node", " "),
    ("Mix with W", "mix(W_t, params)", " "),
]
for number, (title, note, yours) in enumerate(steps):
    box(7 + 19.7 * number, 36, title, note, yours, width=16)
    if number:
        arrow((3.3 + 19.7 * number, 39.7), (7 + 19.7 * number, 39.7))
ax.plot([46.6, 46.6, 101.6, 101.6], [35.2, 34.5, 34.5, 35.2], color="#9a5b00", lw=1)
told = "algorithm: step(params, gradients, state, network, round)"
ax.text(71, 33, told, fontsize=7.5, color="#9a5b00", style="italic", ha="center", va="center")

# Evaluation.
ax.text(6.5, 31.7, "evaluate: the second program", fontsize=8.5, va="center")
box(11, 22.5, "Record", "of one evaluation", width=18)
box(46, 22.5, "Metrics", "per node, mean model", "metrics={...}", width=18)
box(82, 22.5, "State", "params, state, round", width=20)
arrow((94, 36), (94, 30))
arrow((82, 26.2), (64, 26.2))
arrow((46, 26.2), (29, 26.2))

# What the loop does with it.
box(5.5, 6.5, "Callback", "may stop the run", "on_evaluation", width=18)
box(30, 6.5, "History", "all records", width=18)
box(55, 6.5, "Checkpoint", "history and state", width=18)
box(82, 6.5, "Result", "init=result.state continues", width=22)
arrow((14.5, 22.5), (14.5, 14))
arrow((25, 22.5), (25, 17), (39, 17), (39, 14))
arrow((48, 10.2), (55, 10.2))
arrow((39, 6.5), (39, 4), (93, 4), (93, 6.5))
arrow((95, 22.5), (95, 14))
arrow((86, 22.5), (86, 17), (64, 17), (64, 14))
figure.savefig(pathlib.Path(__file__).parent / "_static/architecture.png", dpi=110)
