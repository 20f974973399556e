"""Group relative policy optimisation: "DeepSeekMath", arXiv 2402.03300, section 4.1, without the penalty on distance
from a reference model, which a policy that starts from nothing does not have.

A response is as good as it is better than its group, the other responses to the same prompt. That needs no model of
value, and makes a group of which all are right, or all wrong, teach nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def advantages(rewards: Tensor) -> Tensor:
    """Of `[groups, responses]` rewards: how many standard deviations each lies above its group."""
    return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)


def loss(new: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """The clipped objective of PPO (arXiv 1707.06347, equation 7), to be made smaller.

    new, old: log-probabilities of the responses under the policy that learns and under the one that gave them. That
    one may be some versions older: the ratio corrects for it, and the clip keeps an old response from pulling far.
    """
    ratio = (new - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()


def entropy(log_probs: Tensor) -> Tensor:
    """Mean entropy of `[prompts, answers]`. A little of it in the loss keeps the policy trying."""
    return -(log_probs.exp() * log_probs).sum(1).mean()
