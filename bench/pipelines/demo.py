"""The work of the demo (`examples/multimodal_grpo`) as stages: draw and answer, verify, learn.

A step has one update for any number of micro-batches: gradients are summed, and the next step's rollouts get the new
weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataplane.pipeline import Cost, Pipeline, Rows, Stage
from examples.multimodal_grpo import digits, patches, tokens
from examples.multimodal_grpo.job import Job
from examples.multimodal_grpo.reward import verify

JOB = Job()
PROMPTS = JOB.prompts * len(JOB.pauses)  # of a step: a batch for each rollout worker of the demo


class Rollout:
    """Draws pictures as patches, and samples `JOB.responses` answers of the policy to each."""

    def __init__(self, weights: Path) -> None:
        import torch

        from examples.multimodal_grpo.policy import Policy

        torch.set_num_threads(1)
        self._policy, self._read, self._weights = Policy(JOB.seed), 0, weights

    def __call__(self, batch: Any) -> dict[str, Any]:
        import torch

        self._refresh()
        sizes = batch["size"].numpy()
        grids = np.array([patches.grid_of(int(h), int(w)) for h, w in sizes])
        drawn = []
        for picture, (height, width), grid in zip(batch["picture"].numpy(), sizes, grids, strict=True):
            drawn.append(np.empty((int(np.prod(grid)), patches.PATCH_VALUES), np.float32))
            patches.write_patches(digits.draw(picture, int(height), int(width)), drawn[-1])
        with torch.no_grad():
            log_probs = self._policy(_Seen(drawn, grids)).log_softmax(1)
            answers = torch.multinomial(log_probs.exp(), JOB.responses, replacement=True)
        return {
            "pixel_values": drawn,
            "image_grid_thw": grids,
            "answered": answers.numpy(),
            "log_prob": log_probs.gather(1, answers).numpy(),
        }

    def _refresh(self) -> None:
        import torch

        path = self._weights
        if path.exists() and (written := path.stat().st_mtime_ns) > self._read:
            with np.load(path) as weights:
                self._policy.load_state_dict({name: torch.from_numpy(weights[name][0]) for name in weights.files})
            self._read = written


class _Seen(dict[str, Any]):
    """Arrays that are not stored yet, in the form of the batch that the policy reads."""

    def __init__(self, drawn: list[np.ndarray], grids: np.ndarray) -> None:
        super().__init__(pixel_values=_Packed(drawn), image_grid_thw=_Array(grids))


class _Packed:
    def __init__(self, drawn: list[np.ndarray]) -> None:
        self._drawn = drawn

    def packed(self) -> tuple[Any, None]:
        import torch

        return torch.from_numpy(np.concatenate(self._drawn)), None


class _Array:
    def __init__(self, values: np.ndarray) -> None:
        self._values = values

    def numpy(self) -> np.ndarray:
        return self._values


def reward(batch: Any) -> dict[str, Any]:
    """The reward of each response: 1 if it has the right answer, else 0."""
    answered = batch["answered"].numpy()
    said = [tokens.response(int(answer)) for answer in answered.ravel()]
    right = [answer for answer in batch["answer"].to_list() for _ in range(answered.shape[1])]
    return {"reward": verify(said, right).reshape(answered.shape)}


class Learn:
    """Sums gradients of GRPO, and updates the weights at the end of a step."""

    def __init__(self, weights: Path) -> None:
        import torch

        from examples.multimodal_grpo.policy import Policy

        torch.set_num_threads(1)
        self._policy, self._weights = Policy(JOB.seed), weights
        self._optimizer = torch.optim.Adam(self._policy.parameters(), lr=JOB.learning_rate)

    def __call__(self, batch: Any) -> dict[str, Any]:
        import torch

        from examples.multimodal_grpo import grpo

        log_probs = self._policy(batch).log_softmax(1)
        rewards = torch.tensor(batch["reward"].numpy())
        chosen = log_probs.gather(1, torch.tensor(batch["answered"].numpy()))
        behaviour = torch.tensor(batch["log_prob"].numpy())
        loss = grpo.loss(chosen, behaviour, grpo.advantages(rewards), JOB.clip) - JOB.entropy * grpo.entropy(log_probs)
        (loss * (len(rewards) / PROMPTS)).backward()
        return {"mean_reward": rewards.mean(1).numpy()}

    def finish(self) -> None:
        """Update the weights, and write them to the file."""
        import torch

        torch.nn.utils.clip_grad_norm_(self._policy.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        new = self._weights.with_suffix(".new.npz")
        np.savez(new, **self.state())
        new.replace(self._weights)

    def state(self) -> dict[str, Any]:
        """The weights, each as a column of one row."""
        return {name: values[None].numpy() for name, values in self._policy.state_dict().items()}

    def load(self, batch: Any) -> None:
        """Load the weights that `state` returned."""
        self._policy.load_state_dict({name: column.torch()[0] for name, column in batch.items()})


@dataclass(frozen=True)
class Making:
    """Creates a `Rollout` or a `Learn` in a worker. weights: the file with the newest weights."""

    kind: type
    weights: Path

    def __call__(self) -> Any:
        return self.kind(self.weights)


def described(weights: Path) -> Pipeline:
    """The pipeline, with preliminary costs."""
    cores = Cost(1e-3, token_s=1e-5, cores=1)
    pixels = ("pixel_values", "image_grid_thw")
    return Pipeline(
        [
            Stage(
                "rollout",
                Making(Rollout, weights),
                ("picture", "size"),
                (*pixels, "answered", "log_prob"),
                cores,
                factory=True,
                replicas=None,
                token_bytes=4.0 * patches.PATCH_VALUES,
            ),
            Stage("reward", reward, ("answered", "answer"), ("reward",), cores, replicas=None),
            Stage(
                "learn",
                Making(Learn, weights),
                (*pixels, "answered", "log_prob", "reward"),
                ("mean_reward",),
                cores,
                factory=True,
                stateful=True,
            ),
        ]
    )


def step(number: int) -> tuple[dict[str, Any], Rows]:
    """The rows of a step: columns with digits, each of its own size, and their lengths."""
    rng = np.random.default_rng([JOB.seed, number])
    pictures = digits.load(JOB.seed)
    chosen = rng.integers(len(pictures["answer"]), size=PROMPTS)
    sizes = digits.sizes(PROMPTS, JOB.smallest, JOB.largest, rng)
    columns = {
        "picture": np.asarray(pictures["picture"])[chosen],
        "answer": [pictures["answer"][i] for i in chosen],
        "size": np.array(sizes),
    }
    return columns, Rows.of([int(np.prod(patches.grid_of(h, w))) for h, w in sizes])
