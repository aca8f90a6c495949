"""The method in plain NumPy loops over nodes and neighbours, float64: slow, and easy to check against the paper."""

import collections

import numpy as np


def neighbours(num_nodes, edges):
    found = [set() for _ in range(num_nodes)]
    for i, j in edges:
        found[i].add(int(j))
        found[j].add(int(i))
    return found


def metropolis_hastings(num_nodes, edges):
    """Equation 2."""
    near = neighbours(num_nodes, edges)
    w = np.zeros((num_nodes, num_nodes))
    for i in range(num_nodes):
        for j in near[i]:
            w[i, j] = 1 / (max(len(near[i]), len(near[j])) + 1)
        w[i, i] = 1 - sum(w[i, j] for j in near[i])
    return w


def clique_average(clique_ids):
    """The average of line 4 of Algorithm 3, as a matrix."""
    n = len(clique_ids)
    g = np.zeros((n, n))
    for i in range(n):
        clique = [j for j in range(n) if clique_ids[j] == clique_ids[i]]
        for j in clique:
            g[i, j] = 1 / len(clique)
    return g


def neighbourhood_average(num_nodes, edges):
    near = neighbours(num_nodes, edges)
    g = np.zeros((num_nodes, num_nodes))
    for i in range(num_nodes):
        for j in {i, *near[i]}:
            g[i, j] = 1 / (1 + len(near[i]))
    return g


def mix(w, tree):
    """x_i <- sum_j w_ij x_j, for a dictionary of arrays [nodes, ...]."""
    mixed = {name: np.zeros_like(value) for name, value in tree.items()}
    for name, value in tree.items():
        for i in range(len(w)):
            for j in range(len(w)):
                if w[i, j] != 0:
                    mixed[name][i] += w[i, j] * value[j]
    return mixed


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def logistic_loss_and_gradient(kernel, bias, inputs, labels):
    """Mean cross-entropy of one node's logistic regression on one mini-batch, and its gradient by hand."""
    if len(labels) == 0:
        return 0.0, np.zeros_like(kernel), np.zeros_like(bias)
    inputs = inputs.reshape(len(inputs), -1).astype(np.float64)
    log_p = log_softmax(inputs @ kernel + bias)
    loss = -log_p[np.arange(len(labels)), labels].mean()
    error = np.exp(log_p)
    error[np.arange(len(labels)), labels] -= 1
    error /= len(labels)
    return loss, inputs.T @ error, error.sum(axis=0)


def dsgd(params, batches, w, g, learning_rate, momentum=0.0):
    """Algorithms 1 and 3 with heavy-ball momentum, for logistic regression.

    `params` is {"kernel": [n, d, c], "bias": [n, c]}; `batches` gives, for each round, a list over nodes of
    (inputs, labels).
    """
    params = {name: np.array(value, np.float64) for name, value in params.items()}
    velocity = {name: np.zeros_like(value) for name, value in params.items()}
    losses = []
    for batch in batches:
        gradient = {name: np.zeros_like(value) for name, value in params.items()}
        losses.append(np.zeros(len(batch)))
        for i, (inputs, labels) in enumerate(batch):
            losses[-1][i], gradient["kernel"][i], gradient["bias"][i] = logistic_loss_and_gradient(
                params["kernel"][i], params["bias"][i], inputs, labels
            )
        gradient = mix(g, gradient)
        for name in params:
            velocity[name] = momentum * velocity[name] + gradient[name]
            params[name] = params[name] - learning_rate * velocity[name]
        params = mix(w, params)
    return params, losses


def evaluate(params, inputs, labels):
    """Accuracy and mean loss of every node's logistic regression."""
    flat = inputs.reshape(len(inputs), -1).astype(np.float64)
    accuracy, loss = [], []
    for kernel, bias in zip(params["kernel"], params["bias"], strict=True):
        log_p = log_softmax(flat @ kernel + bias)
        accuracy.append((log_p.argmax(axis=1) == labels).mean())
        loss.append(-log_p[np.arange(len(labels)), labels].mean())
    return np.array(accuracy), np.array(loss)


def consensus_distance(params):
    total = 0.0
    for value in params.values():
        for row in value:
            total += ((row - value.mean(axis=0)) ** 2).sum() / len(value)
    return np.sqrt(total)


def skew(clique, label_distribution):
    """Equation 3, for one clique given as a list of nodes."""
    n, classes = label_distribution.shape
    total = 0.0
    for label in range(classes):
        in_clique = sum(label_distribution[i, label] for i in clique) / len(clique)
        overall = sum(label_distribution[i, label] for i in range(n)) / n
        total += abs(in_clique - overall)
    return total


def distances(num_nodes, edges):
    """All distances, by breadth-first search from every node."""
    near = neighbours(num_nodes, edges)
    found = np.full((num_nodes, num_nodes), -1)
    for start in range(num_nodes):
        found[start, start] = 0
        queue = collections.deque([start])
        while queue:
            node = queue.popleft()
            for other in near[node]:
                if found[start, other] < 0:
                    found[start, other] = found[start, node] + 1
                    queue.append(other)
    return found


def least_loaded_picks(nodes, load, count, choose):
    """`count` times the least loaded of the nodes; ties are settled by `choose`."""
    picks = []
    for _ in range(count):
        least = min(load[node] for node in nodes)
        picks.append(choose([node for node in nodes if load[node] == least]))
        load[picks[-1]] += 1
    return picks


def gn_lenet(params, images):
    """Logits of GN-LeNet as the reference experiments define it; images [batch, height, width, channels]."""

    def conv(x, name):
        kernel, bias = params[name]["kernel"], params[name]["bias"]  # [5, 5, in, out], [out]
        padded = np.pad(x, ((0, 0), (2, 2), (2, 2), (0, 0)))
        out = np.zeros((*x.shape[:3], kernel.shape[3]))
        for row in range(x.shape[1]):
            for column in range(x.shape[2]):
                window = padded[:, row : row + 5, column : column + 5, :]
                out[:, row, column] = np.tensordot(window, kernel, axes=3) + bias
        return out

    def pool(x):
        size = (x.shape[1] - 3) // 2 + 1
        out = np.zeros((len(x), size, size, x.shape[3]))
        for row in range(size):
            for column in range(size):
                out[:, row, column] = x[:, 2 * row : 2 * row + 3, 2 * column : 2 * column + 3].max(axis=(1, 2))
        return out

    def group_norm(x, name):
        out = np.empty_like(x)
        half = x.shape[3] // 2
        for channels in (slice(0, half), slice(half, None)):
            group = x[..., channels]
            mean = group.mean(axis=(1, 2, 3), keepdims=True)
            variance = group.var(axis=(1, 2, 3), keepdims=True)
            out[..., channels] = (group - mean) / np.sqrt(variance + 1e-5)
        return out * params[name]["scale"] + params[name]["bias"]

    x = np.maximum(group_norm(pool(conv(images, "Conv_0")), "GroupNorm_0"), 0)
    x = np.maximum(pool(group_norm(conv(x, "Conv_1"), "GroupNorm_1")), 0)
    x = np.maximum(pool(group_norm(conv(x, "Conv_2"), "GroupNorm_2")), 0)
    return x.reshape(len(x), -1) @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
