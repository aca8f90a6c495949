"""The method in plain NumPy loops over nodes and neighbours, float64: slow, and easy to check against the paper."""

import collections
import functools

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


@functools.cache
def threefry(key, first, second):
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011), on Python integers: the two words of a block."""
    mask = 2**32 - 1
    keys = [int(key[0]), int(key[1]), int(key[0]) ^ int(key[1]) ^ 0x1BD11BDA]
    x, y = (first + keys[0]) & mask, (second + keys[1]) & mask
    for block in range(5):
        for turn in ((13, 15, 26, 6), (17, 29, 16, 24))[block % 2]:
            x = (x + y) & mask
            y = ((y << turn) | (y >> (32 - turn))) & mask
            y ^= x
        x = (x + keys[(block + 1) % 3]) & mask
        y = (y + keys[(block + 2) % 3] + block + 1) & mask
    return x, y


def folded(key, *numbers):
    """The key that `jax.random.fold_in` makes, once per number."""
    key = tuple(key)
    for number in numbers:
        key = threefry(key, 0, number)
    return key


def bits(key, first, second):
    one, other = threefry(key, int(first), int(second))
    return one ^ other


class Fates:
    """What becomes of nodes and links, by the same coins as in a run whose key is `key`.

    A fault is a name and its arguments, as in `dcliques_jax.faults`.
    """

    FAULTS, START, STEPS, PLACES = 2**32 - 2, 2**32 - 1, 2**32 - 1, 2**32 - 3  # that keys are folded with

    def __init__(self, key, num_nodes, faults):
        self.key, self.num_nodes, self.faults = key, num_nodes, faults
        self.memory = {}

    def start_round(self, number):
        """Decides which nodes are online in a round. Rounds must be asked for one after the other."""
        self.number, self.links = number, {}
        self.online = [True] * self.num_nodes
        for index, (name, arguments) in enumerate(self.faults):
            key = folded(self.key, self.FAULTS, index, number)
            for i in range(self.num_nodes):
                if name == "stragglers":
                    self.online[i] &= self._below(key, i, 0, 1 - arguments[0])
                if name == "churn":
                    leave, join = arguments
                    self.online[i] &= self._chain(index, i, 0, 1 - leave, join, join / (leave + join))
                if name == "trace":
                    recorded = arguments[0]
                    self.online[i] &= bool(recorded[number % len(recorded)][i])
            if name == "participation":
                chosen = sorted(range(self.num_nodes), key=lambda i, key=key: bits(key, i, 0))
                for i in chosen[max(1, round(arguments[0] * self.num_nodes)) :]:
                    self.online[i] = False

    def link_works(self, receiver, sender):
        """Whether a message arrives if both ends are online. All messages of a round over a link share its fate."""
        if (receiver, sender) not in self.links:
            self.links[receiver, sender] = all(
                self._link(index, *fault, receiver, sender) for index, fault in enumerate(self.faults)
            )
        return self.links[receiver, sender]

    def _link(self, index, name, arguments, receiver, sender):
        key = folded(self.key, self.FAULTS, index, self.number)
        i, j = min(receiver, sender), max(receiver, sender)
        if name == "message_loss":
            return self._below(key, i, j, 1 - arguments[0])
        if name == "directed message_loss":
            return self._below(key, receiver, sender, 1 - arguments[0])
        if name == "bursts":
            p, length = arguments
            return self._chain(index, i, j, 1 - p / length / (1 - p), 1 / length, 1 - p)
        return True

    def _chain(self, index, i, j, stay, come_back, at_first):
        """The state of a Markov chain in this round, computed from the first round on."""
        known, state = self.memory.get((index, i, j), (-1, None))
        if known < 0:
            state = self._below(folded(self.key, self.FAULTS, index, self.START), i, j, at_first)
        for number in range(known + 1, self.number + 1):
            key = folded(self.key, self.FAULTS, index, number)
            state = self._below(key, i, j, stay if state else come_back)
        self.memory[index, i, j] = self.number, state
        return state

    @staticmethod
    def _below(key, i, j, probability):
        return bits(key, i, j) < min(round(probability * 2**32), 2**32 - 1)

    def places(self, gossip=0):
        """The place of each node in the matrix of a round whose graph is drawn, for each of its gossips."""
        key = folded(self.key, self.STEPS, self.number, *[gossip][: gossip > 0], self.PLACES)
        return sorted(range(self.num_nodes), key=lambda i: bits(key, i, 0))


def faulty_dsgd(params, batches, ws, g, learning_rate, momentum, fates, drawn=False):
    """D-SGD as `dsgd`, with a matrix of `ws` per round in turn, under faults; also messages sent and lost."""
    params = {name: np.array(value, np.float64) for name, value in params.items()}
    velocity = {name: np.zeros_like(value) for name, value in params.items()}
    sent = lost = 0
    for number, batch in enumerate(batches):
        fates.start_round(number)
        n, w, places = len(batch), ws[number % len(ws)], list(range(len(batch)))
        if drawn:
            places = fates.places()
        weight = [[w[places[i]][places[j]] for j in range(n)] for i in range(n)]
        for i in range(n):
            for j in range(n):
                for entry in (weight[i][j], g[i][j]):
                    if i != j and entry != 0 and fates.online[j]:
                        sent += 1
                        lost += not (fates.online[i] and fates.link_works(i, j))
        heard = [[i == j or (fates.online[j] and fates.link_works(i, j)) for j in range(n)] for i in range(n)]
        gradient = {name: np.zeros_like(value) for name, value in params.items()}
        for i, (inputs, labels) in enumerate(batch):
            _, gradient["kernel"][i], gradient["bias"][i] = logistic_loss_and_gradient(
                params["kernel"][i], params["bias"][i], inputs, labels
            )
        before = {name: value.copy() for name, value in params.items()}
        for name in params:
            for i in range(n):
                if fates.online[i]:
                    arrived = [j for j in range(n) if g[i][j] != 0 and heard[i][j]]
                    average = sum(g[i][j] * gradient[name][j] for j in arrived) / sum(g[i][j] for j in arrived)
                    velocity[name][i] = momentum * velocity[name][i] + average
                    params[name][i] = before[name][i] - learning_rate * velocity[name][i]
        stepped = {name: value.copy() for name, value in params.items()}
        for name in params:
            for i in range(n):
                if fates.online[i]:
                    x = stepped[name]
                    params[name][i] = x[i] + sum(
                        weight[i][j] * (x[j] - x[i]) for j in range(n) if j != i and weight[i][j] != 0 and heard[i][j]
                    )
    return params, sent, lost


# Rivals of D-SGD, on models as rows of a matrix: the bias first, then the kernel


def as_rows(params):
    pairs = zip(params["bias"], params["kernel"], strict=True)
    return np.array([np.concatenate([bias.ravel(), kernel.ravel()]) for bias, kernel in pairs])


def as_params(rows, classes):
    kernels = rows[:, classes:].reshape(len(rows), -1, classes)
    return {"bias": rows[:, :classes], "kernel": kernels}


class Exchange:
    """What nodes hear in one round: matrices as faults left them, in the order in which they multiply."""

    def __init__(self, number, batch, classes, ws, g, online, radius=0.0):
        self.number, self.batch, self.classes = number, batch, classes
        self.ws, self.g, self.online, self.radius = ws, g, online, radius

    def gradients(self, x):
        """The gradients that Clique Averaging leaves, at the worst models nearby if there is a radius."""
        found = self._at(x)
        if self.radius:
            steps = [self.radius * g / np.linalg.norm(g) if g.any() else g for g in found]
            found = self._at(x + np.array(steps))
        return _times(self.g, found)

    def _at(self, x):
        found = np.zeros_like(x)
        params = as_params(x, self.classes)
        for i, (inputs, labels) in enumerate(self.batch):
            _, kernel, bias = logistic_loss_and_gradient(params["kernel"][i], params["bias"][i], inputs, labels)
            found[i] = np.concatenate([bias, kernel.ravel()])
        return found

    def gossip(self, x):
        for w in self.ws:
            x = _times(w, x)
        return x

    def kept(self, after, before):
        """Offline nodes keep what they have."""
        return np.array([after[i] if self.online[i] else before[i] for i in range(len(before))])


def _times(w, x):
    return np.array([sum(w[i][j] * x[j] for j in range(len(x)) if w[i][j] != 0) for i in range(len(x))])


def exchanges(batches, classes, ws, g, fates=None, *, every=1, times=1, radius=0.0, drawn=False):
    """The rounds of a run, and the messages of each: models sent, gradients sent, and how many of both were lost.

    Nodes gossip `times` times after every `every`-th round; the matrices `ws` take turns, one per gossip.
    """
    rounds, counts = [], []
    gossips = 0
    for number, batch in enumerate(batches):
        n, sent, lost = len(batch), [0, 0], 0
        online, works = [True] * n, lambda i, j: True
        if fates is not None:
            fates.start_round(number)
            online, works = fates.online, fates.link_works
        talking = (number + 1) % every == 0
        taken = []
        for gossip in range(times if talking else 0):
            places = fates.places(gossip) if drawn else range(n)
            taken.append([[ws[gossips % len(ws)][p][q] for q in places] for p in places])
            gossips += 1
        heard = [[i == j or (online[j] and works(i, j)) for j in range(n)] for i in range(n)]
        averages = np.asarray(g if talking else np.eye(n))
        for kind, matrices in enumerate((taken, [averages])):
            for matrix in matrices:
                for i in range(n):
                    for j in range(n):
                        if i != j and matrix[i][j] != 0 and online[j]:
                            sent[kind] += 1
                            lost += not (online[i] and heard[i][j])
        kept = []
        for matrix in taken:  # the weight of a lost message stays with the receiver
            w = np.array([[matrix[i][j] if heard[i][j] else 0.0 for j in range(n)] for i in range(n)])
            for i in range(n):
                w[i][i] = matrix[i][i] + sum(matrix[i][j] for j in range(n) if not heard[i][j])
            kept.append(w)
        averages = np.array([[averages[i][j] if heard[i][j] else 0.0 for j in range(n)] for i in range(n)])
        averages = np.array([row / row.sum() for row in averages])
        rounds.append(Exchange(number, batch, classes, kept, averages, list(online), radius))
        counts.append((*sent, lost))
    return rounds, counts


def descent(x, rounds, rate):
    """D-SGD: X <- W (X - rate G)."""
    for at in rounds:
        x = at.kept(at.gossip(x - rate * at.gradients(x)), x)
    return x


def chebyshev_descent(x, rounds, rate):
    """D-SGD with a polynomial of W: T_m(W / l) / T_m(1 / l), by the recursion of T_m itself."""
    for at in rounds:
        w, *more = at.ws
        eigenvalue = max(np.sort(np.abs(np.linalg.eigvalsh(w)))[-2], 1e-9)  # 0 if all nodes are joined
        before = x - rate * at.gradients(x)
        now = _times(w, before) / eigenvalue
        small, large = 1.0, 1 / eigenvalue
        for _ in more:
            before, now = now, 2 * _times(w, now) / eigenvalue - before
            small, large = large, 2 * large / eigenvalue - small
        x = now / large
    return x


def gradient_tracking(x, rounds, rate, momentum=0.0):
    """Y = S + G - G_prev; X <- W (X - rate V), V = momentum V + Y; S <- W Y."""
    s, last, v = np.zeros_like(x), np.zeros_like(x), np.zeros_like(x)
    for at in rounds:
        g = at.gradients(x)
        y = s + g - last
        moved = momentum * v + y
        x, v = at.kept(at.gossip(x - rate * moved), x), at.kept(moved, v)
        s, last = at.kept(at.gossip(y), s), at.kept(g, last)
    return x


def d2(x, rounds, rate):
    """X+ = W (2 X - X_prev - rate (G - G_prev)), and W (X - rate G) at first: the form with two models in memory.

    An offline node's own last two models stay, so it keeps its correction.
    """
    earlier, last = [None] * len(x), np.zeros_like(x)
    for at in rounds:
        g = at.gradients(x)
        sent = np.array(
            [
                x[i] - rate * g[i] if earlier[i] is None else 2 * x[i] - earlier[i] - rate * (g[i] - last[i])
                for i in range(len(x))
            ]
        )
        after = at.gossip(sent)
        for i in range(len(x)):
            if at.online[i]:
                earlier[i], last[i] = x[i].copy(), g[i]
        x = at.kept(after, x)
    return x


def gossip_momentum(x, rounds, rate, momentum):
    """M = b M + G; X <- W (X - rate M); M <- W M."""
    m = np.zeros_like(x)
    for at in rounds:
        half = momentum * m + at.gradients(x)
        x, m = at.kept(at.gossip(x - rate * half), x), at.kept(at.gossip(half), m)
    return x


def quasi_global_momentum(x, rounds, rate, momentum, nesterov=False):
    """M = b M' + G; X+ = W (X - rate M), or with G + b M; M' <- b M' + (1 - b) (X - X+) / rate. Rates may vary."""
    m = np.zeros_like(x)
    for at in rounds:
        eta = rate(at.number) if callable(rate) else rate
        g = at.gradients(x)
        direction = momentum * m + g
        after = at.gossip(x - eta * (g + momentum * direction if nesterov else direction))
        moved = (x - after) / eta if eta else np.zeros_like(x)
        x, m = at.kept(after, x), at.kept(momentum * m + (1 - momentum) * moved, m)
    return x


def push_sum(x, rounds, rate):
    """The sums X and the weights w are pushed; models are X / w."""
    w = np.ones((len(x), 1))
    z = x
    for at in rounds:
        x = at.gossip(x - rate * at.gradients(z))
        w = at.gossip(w)
        z = x / w
    return z


def choco(x, rounds, rate, step_size, compress):
    """Every node keeps a copy of each neighbour's model; `compress(number, node, change)` is what is sent."""
    n = len(x)
    copies = [{j: np.zeros(x.shape[1]) for j in range(n)} for _ in range(n)]  # by holder, of whom
    for at in rounds:
        y = x - rate * at.gradients(x)
        (w,) = at.ws
        sent = [compress(at.number, j, y[j] - copies[j][j]) for j in range(n)]
        for i in range(n):
            for j in range(n):
                if i == j or w[i][j] != 0:
                    copies[i][j] = copies[i][j] + sent[j]
        x = np.array(
            [y[i] + step_size * sum(w[i][j] * (copies[i][j] - copies[i][i]) for j in range(n)) for i in range(n)]
        )
    return x
