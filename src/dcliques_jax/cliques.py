"""Which node joins which clique.

An integer array `clique_ids` `[nodes]` describes a set of cliques: nodes with the same id form a clique. Ids run from 0
to the number of cliques minus one.

`greedy_swap` knows the label distributions of all nodes. `push_sum_labels` and `decentralised_greedy_swap` do the same
by messages between nodes, each of which knows little: the paper names this as future work.
"""

from dcliques_jax._cliques.central import (
    check_clique_ids,
    check_label_distribution,
    greedy_swap,
    ideal_cliques,
    members,
    random_cliques,
    single_classes,
    skew,
    skew_trajectory,
)
from dcliques_jax._cliques.decentralised import (
    Construction,
    Estimation,
    decentralised_greedy_swap,
    decentralised_trajectory,
    push_sum_labels,
    push_sum_trajectory,
)

__all__ = [
    "Construction",
    "Estimation",
    "check_clique_ids",
    "check_label_distribution",
    "decentralised_greedy_swap",
    "decentralised_trajectory",
    "greedy_swap",
    "ideal_cliques",
    "members",
    "push_sum_labels",
    "push_sum_trajectory",
    "random_cliques",
    "single_classes",
    "skew",
    "skew_trajectory",
]
