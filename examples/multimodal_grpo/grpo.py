"""Group relative policy optimisation ("DeepSeekMath", arXiv 2402.03300, section 4.1), without the KL penalty: a policy
with random weights has no reference model.

The advantage of a response is its reward relative to its group, the responses to the same prompt. This needs no value
model. A group in which all responses are right, or all wrong, has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def advantages(rewards: Tensor) -> Tensor:
    """The distance of each reward from the mean of its group, in standard deviations. `rewards` and the result are
    [groups, responses]."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def loss(new: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """The negative of PPO's clipped objective (arXiv 1707.06347, equation 7).

    new, old: log-probabilities of the responses under the current policy and under the one that generated them, which
    may be some versions older. The ratio corrects for that, and the clip bounds the update by an old response.
    """
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()


def entropy(log_probs: Tensor) -> Tensor:
    """The mean entropy of `[prompts, answers]` log-probabilities. As a bonus in the loss it keeps the policy
    exploring."""
    return -(log_probs.exp() * log_probs).sum(1).mean()
