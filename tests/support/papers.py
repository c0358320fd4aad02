"""Update rules as published, transcribed into NumPy in the papers' own symbols.

Written from the papers (and, where it says so, from their authors' code). Nothing here knows
orchestra: `tests/contract/strategies/test_papers.py` compares the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]

Gradient = Callable[[int, int, Vector], Vector]
"""gradient(i, t, x): the stochastic gradient of worker i in its step t, at x."""

MixingMatrices = Callable[[int], Matrix]
"""P(k), whose columns sum to 1: P[j, i] is the part of its mass that node i sends to node j."""


def local_sgd(
    gradient: Gradient,
    samples: Sequence[Sequence[int]],
    x0: Vector,
    eta: float,
    period: int | None,
    mu: float = 0.0,
) -> Vector:
    """Local SGD (Stich, ICLR 2019, Algorithm 1); the mean as in federated averaging (McMahan et
    al., AISTATS 2017, Algorithm 1): sum_k n_k / n w_k, where n_k counts the samples that worker k
    has processed since the last mean.

    `samples[t][i]` is the size of the minibatch of worker i in step t. The last step is always one
    of those after which the mean is taken (Stich: T is in I_T), and with period None the only one.
    Momentum, where there is any, stays where it is.
    """
    workers = range(len(samples[0]))
    x, v = [x0 for _ in workers], [np.zeros_like(x0) for _ in workers]
    processed = [0 for _ in workers]
    for t, batch in enumerate(samples):
        for i in workers:
            if batch[i] > 0:
                v[i] = mu * v[i] + gradient(i, t, x[i])
                x[i] = x[i] - eta * v[i]
                processed[i] += batch[i]
        if t + 1 == len(samples) or (period is not None and (t + 1) % period == 0):
            n = sum(processed)
            mean = sum((processed[i] / n * x[i] for i in workers), np.zeros_like(x0))
            x, processed = [mean for _ in workers], [0 for _ in workers]
    return x[0]


def easgd(
    gradient: Gradient,
    workers: int,
    steps: int,
    x0: Vector,
    eta: float,
    alpha: float,
    tau: int = 1,
) -> tuple[Matrix, Vector]:
    """Synchronous EASGD (Zhang, Choromanska, LeCun, NIPS 2015, section 3).

    x^i_{t+1} = x^i_t - eta g^i_t(x^i_t) - alpha (x^i_t - x~_t), alpha = eta rho,
    x~_{t+1} = (1 - beta) x~_t + beta (1/p sum_i x^i_t),         beta = p alpha.

    Both lines read x^i_t and x~_t. With a communication period the two elastic terms appear in the
    steps t = 0, tau, 2 tau, ..., as in the paper's Algorithm 1.

    Returns the workers' x^i and the center variable x~.
    """
    beta = workers * alpha
    x, center = [x0] * workers, x0
    for t in range(steps):
        communicates = t % tau == 0
        elastic = [alpha * (x[i] - center) * communicates for i in range(workers)]
        if communicates:
            center = (1 - beta) * center + beta * np.mean(x, axis=0)
        x = [x[i] - eta * gradient(i, t, x[i]) - elastic[i] for i in range(workers)]
    return np.stack(x), center


def easgd_asynchronous(
    gradient: Gradient,
    workers: int,
    order: Sequence[int],
    x0: Vector,
    eta: float,
    alpha: float,
    tau: int,
    delta: float = 0.0,
) -> tuple[Matrix, Vector]:
    """Asynchronous EASGD (Zhang et al., Algorithm 1), and with delta EAMSGD (Algorithm 2).

    `order` names the worker of each pass through the algorithm's loop. The worker takes its
    gradient at the x of before its elastic step.
    """
    xs, vs, center = [x0] * workers, [np.zeros_like(x0)] * workers, x0
    clock = [0] * workers
    for i in order:
        x = xs[i]
        if clock[i] % tau == 0:
            difference = alpha * (x - center)
            xs[i] = xs[i] - difference  # a)
            center = center + difference  # b)
        vs[i] = delta * vs[i] - eta * gradient(i, clock[i], x + delta * vs[i])
        xs[i] = xs[i] + vs[i]
        clock[i] += 1
    return np.stack(xs), center


def one_peer_exponential(nodes: int) -> MixingMatrices:
    """The one-peer directed exponential graph (Assran et al., ICML 2019, appendix A): in turn node
    i sends to the node 1, 2, 4, ... places on, up to 2^floor(log2(n - 1)), a half of its mass."""
    distances = [2**e for e in range(int(np.log2(nodes - 1)) + 1)]

    def matrix(k: int) -> Matrix:
        p = 0.5 * np.eye(nodes)
        for i in range(nodes):
            p[(i + distances[k % len(distances)]) % nodes, i] += 0.5
        return p

    return matrix


def star(nodes: int) -> MixingMatrices:
    """Node 0 sends to all, all to node 0, each dividing its mass evenly: w does not stay 1."""
    p = np.zeros((nodes, nodes))
    p[:, 0] = 1 / nodes
    p[0, 1:] = 0.5
    p[range(1, nodes), range(1, nodes)] = 0.5
    return lambda k: p


def sgp(
    gradient: Gradient, steps: int, x0: Vector, gamma: float, p: MixingMatrices
) -> tuple[Matrix, Vector]:
    """Stochastic gradient push (Assran et al., ICML 2019, Algorithm 1). Returns x and w."""
    return overlap_sgp(gradient, steps, x0, gamma, p, tau=0)


def overlap_sgp(
    gradient: Gradient,
    steps: int,
    x0: Vector,
    gamma: float,
    p: MixingMatrices,
    tau: int,
    every: int = 1,
) -> tuple[Matrix, Vector]:
    """tau-overlap SGP (Assran et al., section 3 and Algorithm 2) on a network on which every
    message takes as long as is allowed: "the gossip updates incorporate outdated messages,
    (x_j^(k'), w_j^(k')) where k - k' <= tau", and here k - k' = tau.

    Node i sends in the steps k that `every` divides, after its gradient and before it adds what it
    was sent. In Algorithm 2 these are the steps that tau divides (every = tau); the convergence
    theorem, which only bounds the delay, also covers every = 1, with up to tau messages of a link
    in flight. P is that of the number of the exchange, as the authors' code rotates peers: with the
    P of the step, and an even tau, a node of the one-peer graph would never reach half of them.

    Returns the push-sum numerators x and the weights w, with what is still in flight at the end
    added. tau = 0 is Algorithm 1.
    """
    nodes = len(p(0))
    x, w = np.tile(x0, (nodes, 1)), np.ones(nodes)
    flying: dict[int, tuple[Matrix, Vector]] = {}
    for k in range(steps):
        z = x / w[:, None]
        x = np.stack([x[i] - gamma * gradient(i, k, z[i]) for i in range(nodes)])
        if k % every == 0:
            matrix = p(k // every)
            kept = np.diag(np.diag(matrix))
            flying[k] = (matrix - kept) @ x, (matrix - kept) @ w
            x, w = kept @ x, kept @ w
        if k - tau in flying:
            arrived_x, arrived_w = flying.pop(k - tau)
            x, w = x + arrived_x, w + arrived_w
    for arrived_x, arrived_w in flying.values():
        x, w = x + arrived_x, w + arrived_w
    return x, w


def overlap_sgp_one_exchange(
    gradient: Gradient, steps: int, x0: Vector, gamma: float, p: MixingMatrices, tau: int
) -> tuple[Matrix, Vector]:
    """Overlapped SGP as its authors' code has it (facebookresearch/stochastic_gradient_push,
    gossip_module/distributed.py): one exchange at a time.

    Before the forward pass of a step (`__make_forward_pre_hook`) a node first adds what has arrived
    (`_query_gossip_queue`), here of the exchange that began tau steps ago, which is the longest
    that the code lets it take, tau = synch_freq + 1 (but for the first exchange, one step less,
    since the query before it is counted too); then, unless an exchange is still in flight
    ("don't transfer new params if old params haven't been mixed yet"), it begins the next
    (`transfer_params`): x and w are multiplied by the node's own part and sent. The gradient at
    x / w is subtracted after that. The graph turns once an exchange (`refresh_peers_`), not once a
    step.

    Returns x and w, with the exchange that is still in flight at the end added.
    """
    nodes = len(p(0))
    x, w = np.tile(x0, (nodes, 1)), np.ones(nodes)
    begun, exchange = 0, 0
    flying: tuple[Matrix, Vector] | None = None
    for k in range(steps):
        if flying is not None and k - begun == tau:
            x, w, flying = x + flying[0], w + flying[1], None
        if flying is None:
            kept = np.diag(np.diag(p(exchange)))
            sent = p(exchange) - kept
            flying, begun, exchange = (sent @ x, sent @ w), k, exchange + 1
            x, w = kept @ x, kept @ w
        z = x / w[:, None]
        x = np.stack([x[i] - gamma * gradient(i, k, z[i]) for i in range(nodes)])
    if flying is not None:
        x, w = x + flying[0], w + flying[1]
    return x, w


Buffers = Literal["maintain", "reset", "average"]


def hop(
    gradient: Gradient,
    events: Sequence[Sequence[tuple[str, int, dict[int, int]]]],
    w: Matrix,
    staleness: int,
    x0: Vector,
    eta: float,
) -> list[Vector]:
    """Hop (Luo et al., ASPLOS 2019): the parameters of each worker after what it did in order.

    A worker enters iteration k, and sends x; it reduces in iteration k the updates {j: Iter(u)},
    which it takes in place of its own x, weighted by W and by Iter(u) - (k - s) + 1, and applies
    the gradient that it took at what it sent; or it jumps to k + 1, after the same without one.
    """
    todo = [list(own) for own in events]
    x, sent, steps = [x0 for _ in events], {}, [0 for _ in events]
    while any(todo):
        before = sum(map(len, todo))
        for i, own in enumerate(todo):
            while own and all((j, of) in sent for j, of in own[0][2].items()):
                word, k, updates = own.pop(0)
                if word == "enter":
                    sent[i, k] = x[i]
                    continue
                terms = [(w[i, i] * (staleness + 1), x[i])]
                for j, of in updates.items():
                    terms.append((w[i, j] * (of - (k - staleness) + 1), sent[j, of]))
                mean = sum((a * u for a, u in terms), np.zeros_like(x0)) / sum(a for a, _ in terms)
                if word == "reduce":
                    mean = mean - eta * gradient(i, steps[i], sent[i, k])
                    steps[i] += 1
                x[i] = mean
        assert sum(map(len, todo)) < before, "the events contradict each other"
    return x


def slowmo(
    gradient: Gradient,
    workers: int,
    steps: int,
    x0: Vector,
    gamma: Callable[[int], float | Vector],
    mu: float,
    tau: int,
    alpha: float,
    beta: float,
    buffers: Buffers = "maintain",
    base_period: int | None = None,
) -> Vector:
    """SlowMo (Wang, Tantia, Ballas, Rabbat, ICLR 2020, Algorithm 1) over local SGD with momentum.

    Its inner loop has tau steps; within it the base algorithm, local SGD, averages parameters every
    `base_period` steps of its own count (fairscale's `slowmo_frequency` and `localsgd_frequency`).
    gamma(t) is the fast learning rate in the outer iteration t. Line 2 resets, maintains or
    averages the base optimizer's buffers. `steps` is a multiple of tau.
    """
    assert steps % tau == 0
    x, h = [x0] * workers, [np.zeros_like(x0)] * workers
    outer, u = x0, np.zeros_like(x0)
    for t in range(steps // tau):
        if buffers == "reset":
            h = [np.zeros_like(x0)] * workers
        elif buffers == "average":
            h = [np.mean(h, axis=0)] * workers
        for k in range(t * tau, (t + 1) * tau):
            h = [mu * h[i] + gradient(i, k, x[i]) for i in range(workers)]
            x = [x[i] - gamma(t) * h[i] for i in range(workers)]
            if base_period is not None and (k + 1) % base_period == 0:
                x = [np.mean(x, axis=0)] * workers
        average = np.mean(x, axis=0)
        u = beta * u + (outer - average) / gamma(t)
        outer = outer - alpha * gamma(t) * u
        x = [outer] * workers
    return outer


def bmuf(
    gradient: Gradient,
    workers: int,
    blocks: int,
    block_steps: int,
    x0: Vector,
    rate: float,
    eta: float,
    zeta: float,
    nesterov: bool = False,
) -> Vector:
    """Blockwise model-update filtering (Chen and Huo, ICASSP 2016), with classical block momentum
    or Nesterov's, over plain SGD within a block.

    G(t) = mean(t) - W_g(t-1), Delta(t) = eta Delta(t-1) + zeta G(t), W(t) = W(t-1) + Delta(t); the
    next block begins at W_g(t) = W(t), and with Nesterov's at W_g(t) = W(t) + eta Delta(t).
    """
    w = w_g = x0
    delta = np.zeros_like(x0)
    for t in range(blocks):
        x = [w_g] * workers
        for k in range(t * block_steps, (t + 1) * block_steps):
            x = [x[i] - rate * gradient(i, k, x[i]) for i in range(workers)]
        g = np.mean(x, axis=0) - w_g
        delta = eta * delta + zeta * g
        w = w + delta
        w_g = w + eta * delta if nesterov else w
    return w_g


def stale_synchronous_parallel(
    gradient: Gradient, workers: int, order: Sequence[int], x0: Vector, eta: float, s: float
) -> Vector:
    """Stale synchronous parallel (Ho et al., NIPS 2013, section 2); s infinite: asynchronous SGD.

    `order` names the worker of each push; it is applied at once. A worker at clock c reads when the
    slowest worker's clock is at least c - s, and then sees all that has been applied.
    """
    w = x0
    clock, read = [0] * workers, [x0] * workers
    waits: list[int] = []
    for i in order:
        assert i not in waits, f"worker {i} pushes before it may read"
        w = w - eta * gradient(i, clock[i], read[i])
        clock[i] += 1
        waits.append(i)
        for other in [j for j in waits if clock[j] - min(clock) <= s]:
            waits.remove(other)
            read[other] = w
    return w


def dc_asgd(
    gradient: Gradient,
    workers: int,
    order: Sequence[int],
    x0: Vector,
    eta: float,
    lambda0: float,
    m: float | None = None,
) -> Vector:
    """DC-ASGD-c (m None) and DC-ASGD-a (Zheng et al., ICML 2017, Algorithm 2, equations 10 and 14).

    As in the authors' code (Microsoft Multiverso) MeanSquare is kept for each worker, takes in the
    gradient before lambda is computed, and epsilon = 1e-7 stands inside the root.
    """
    w = x0
    clock, backup = [0] * workers, [x0] * workers
    mean_square = [np.zeros_like(x0)] * workers
    for i in order:
        g = gradient(i, clock[i], backup[i])
        strength: float | Vector = lambda0
        if m is not None:
            mean_square[i] = m * mean_square[i] + (1 - m) * g * g
            strength = lambda0 / np.sqrt(mean_square[i] + 1e-7)
        w = w - eta * (g + strength * g * g * (w - backup[i]))
        clock[i] += 1
        backup[i] = w
    return w


def fedbuff(
    gradient: Gradient,
    workers: int,
    order: Sequence[int],
    x0: Vector,
    eta: float,
    size: int,
    exponent: float,
) -> Vector:
    """FedBuff (Nguyen et al., AISTATS 2022, Algorithm 1), each update being one local gradient.

    The server adds s(tau) g of each arrival to a buffer, with s(tau) = (1 + tau)^-exponent, and tau
    the server's updates since the client got its model. Every `size` arrivals it takes a step with
    the buffer over `size`. A client gets the server's model right after its upload. What is in the
    buffer at the end is applied, too, over the number of its arrivals.
    """
    w = x0
    clock, version = [0] * workers, 0
    model, got = [x0] * workers, [0] * workers
    buffer: list[Vector] = []
    for place, i in enumerate(order):
        g = gradient(i, clock[i], model[i])
        buffer.append((1 + version - got[i]) ** -exponent * g)
        if len(buffer) == size or place == len(order) - 1:
            w = w - eta * sum(buffer, np.zeros_like(x0)) / len(buffer)
            version += 1
            buffer = []
        clock[i] += 1
        model[i], got[i] = w, version
    return w


def prague(
    gradient: Gradient,
    workers: int,
    events: Sequence[int | tuple[int, ...]],
    x0: Vector,
    eta: float,
) -> list[Matrix]:
    """Local steps and partial all-reduces (Prague: Luo et al., ASPLOS 2020), in the order `events`.

    An event i is the local step x_i <- x_i - eta g_i(x_i) of worker i. A group G of workers is
    X <- X F^G, where F^G has 1/|G| in the rows and columns of G, and is the identity elsewhere.

    Returns X = [x_0 ... x_{n-1}], one column a worker, at the beginning and after each event.
    """
    x, t = [np.stack([x0] * workers, axis=1)], [0] * workers
    for event in events:
        new = x[-1].copy()
        if isinstance(event, int):
            new[:, event] -= eta * gradient(event, t[event], new[:, event])
            t[event] += 1
        else:
            f = np.eye(workers)
            f[np.ix_(event, event)] = 1 / len(event)
            new = new @ f
        x.append(new)
    return x


def loss_stable(losses: Sequence[float], window: int, threshold: float) -> int | None:
    """Strategy-Switch's empirical rule (Provatas et al., IEEE Access 2025), as O.N.O. documents it:
    the number of losses seen when the mean relative change of the last `window` of them,
    1/(W-1) sum_{i=2..W} |L_i - L_{i-1}| / L_{i-1}, is first at most `threshold`.
    """
    for seen in range(window, len(losses) + 1):
        last = losses[seen - window : seen]
        change = sum(abs(b - a) / a for a, b in pairwise(last))
        if change / (window - 1) <= threshold:
            return seen
    return None
