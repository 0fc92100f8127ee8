"""Births and deaths of nodes: their probabilities, and those of masks (mBNN, Kong et al. 2023).

A move changes the masks of a few nodes of any layers. With the same probability it is a death of active nodes or a
birth of others. A birth takes all sets of inactive nodes with the same probability. A death draws one node after the
other, with probabilities proportional to exp(-|g|/2), where g is the derivative of the log likelihood with respect to
the mask of the node at the current masks: nodes that hardly matter die first.
"""

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

MOST = 5  # the largest number of nodes of a move: all of their orders count


class Evidence(NamedTuple):
    """What the data say about a mask.

    Attributes:
        log_likelihood: The log likelihood of all labels.
        slopes: Its derivative with respect to the mask of each node; empty if it was not asked for.
    """

    log_likelihood: float
    slopes: Tensor


class MaskPrior:
    """The prior of the masks of a layer with s of its n nodes active: exp(-λ'·s²)/C(n, s), and 0 without any node.

    Args:
        layers: For each layer, the places of the nodes that have masks.
        strength: λ'.
    """

    def __init__(self, layers: list[slice], strength: float) -> None:
        self._layers, self._strength = layers, strength

    def log_prob(self, mask: Tensor) -> float:
        """Return the log probability of a mask, up to a constant."""
        return sum(self._of_layer(mask[layer]) for layer in self._layers)

    def _of_layer(self, mask: Tensor) -> float:
        active, size = int(mask.sum()), len(mask)
        orders = math.lgamma(size + 1) - math.lgamma(active + 1) - math.lgamma(size - active + 1)
        return -self._strength * active**2 - orders if active else -math.inf


def moved(
    mask: Tensor,
    maskable: Tensor,
    prior: MaskPrior,
    evidence: Callable[[Tensor, bool], Evidence],
    most: int,
    generator: torch.Generator,
) -> Tensor:
    """Return the mask after a Metropolis-Hastings step, which is the same one if the move is rejected.

    Args:
        mask: Whether each node is active.
        maskable: Whether each node has a mask; all others are always active.
        prior: The prior of masks.
        evidence: Returns the log likelihood of a mask and, if the second argument is true, its slopes.
        most: The largest number of nodes of a move.
        generator: The source of all random choices.
    """
    death = bool(torch.randint(2, (), generator=generator))
    number = int(torch.randint(1, most + 1, (), generator=generator))
    luck = torch.rand((), generator=generator, dtype=torch.float64).item()
    noise = torch.empty(len(mask), dtype=torch.float64).exponential_(generator=generator)
    if int(maskable[mask == death].sum()) < number:
        return mask
    before = evidence(mask, True) if death else None
    logits = _death_logits(mask, maskable, before.slopes) if before else _birth_logits(mask, maskable)
    nodes = (logits - noise.log()).topk(number).indices  # Gumbel noise: a sample without replacement
    proposal = mask.index_fill(0, nodes, not death)
    log_ratio = prior.log_prob(proposal) - prior.log_prob(mask)
    if log_ratio == -math.inf:  # a layer would have no node
        return mask
    before, after = before or evidence(mask, False), evidence(proposal, not death)
    back = _birth_logits(proposal, maskable) if death else _death_logits(proposal, maskable, after.slopes)
    log_ratio += after.log_likelihood - before.log_likelihood
    log_ratio += log_prob_of_set(back, nodes) - log_prob_of_set(logits, nodes)
    return proposal if math.log(max(luck, 1e-300)) < log_ratio else mask


def _death_logits(mask: Tensor, maskable: Tensor, slopes: Tensor) -> Tensor:
    return (-0.5 * slopes.abs()).masked_fill(~(mask & maskable), -math.inf)


def _birth_logits(mask: Tensor, maskable: Tensor) -> Tensor:
    return torch.zeros(len(mask), dtype=torch.float64).masked_fill(mask | ~maskable, -math.inf)


def log_prob_of_set(logits: Tensor, nodes: Tensor) -> float:
    """Return the log probability to draw a set of nodes one after the other without replacement, in any order.

    Args:
        logits: The log probability of each node, up to a constant; -inf for those that cannot be drawn.
        nodes: The set.
    """
    orders = []
    for order in itertools.permutations(nodes.tolist()):
        left, log_prob = logits.clone(), 0.0
        for node in order:
            log_prob += float(left[node] - left.logsumexp(0))
            left[node] = -math.inf
        orders.append(log_prob)
    return float(torch.tensor(orders, dtype=torch.float64).logsumexp(0))
