"""`python -m examples.history_rollout`: several epochs of GRPO, each rollout with and without history."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

import dataplane as dp
from examples.history_rollout import task
from examples.history_rollout.policy import Grpo, policy, show
from examples.history_rollout.rollout import Measured, both


@dataclass
class Job:
    """The objects that all steps share."""

    plane: dp.Plane
    history: Any
    model: Any
    learner: Grpo

    def record(self, responses: list[list[list[int]]], rewards: list[list[float]], start: int, epoch: int) -> None:
        """Put the responses of a step, [prompts][samples], and record them by reference. start: the first prompt's
        number."""
        columns = {
            "key": [f"prompt-{number}" for number, group in enumerate(responses, start) for _ in group],
            "response_ids": [np.array(response, np.int32) for group in responses for response in group],
            "reward": np.array([each for group in rewards for each in group]),
        }
        ref = self.plane.put(columns)
        self.history.record(ref, epoch=epoch, reward="reward")
        self.plane.free(ref)


def epoch_of(job: Job, prompts: list[list[int]], epoch: int, samples: int, batch: int = 4) -> tuple[Measured, float]:
    """Make one pass over all prompts. Returns the counters and the mean reward."""
    measured, got = Measured(), []
    for start in range(0, len(prompts), batch):
        asked = prompts[start : start + batch]
        responses: list[list[list[int]]] = []
        rewards: list[list[float]] = []
        for number, prompt in enumerate(asked, start):
            seeds = [(epoch * 10_007 + number) * 101 + sample for sample in range(samples)]
            group = [both(job.model, prompt, seed, job.history, f"prompt-{number}", measured) for seed in seeds]
            responses.append(group)
            rewards.append([task.reward(prompt, response) for response in group])
        job.record(responses, rewards, start, epoch)
        job.learner.update(asked, responses, rewards)
        got += [each for several in rewards for each in several]
    return measured, float(np.mean(got))


def main(arguments: list[str]) -> int:
    """Print a line for each epoch. Returns 1 if a response differed with history, else 0."""
    parser = argparse.ArgumentParser(prog="python -m examples.history_rollout", description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--shown", type=int, default=300, help="steps of supervised training before GRPO")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = policy(options.seed)
    loss = show(model, options.shown, options.seed + 1)
    print(f"shown {options.shown} x 48 answers: loss {loss:.3f}", flush=True)
    learner, prompts = Grpo(model), task.prompts(options.prompts, options.seed + 10**6)
    figures, different = [], 0
    with dp.connect() as plane:
        job = Job(plane, plane.history("sorting", samples=options.samples), model, learner)
        for epoch in range(1, options.epochs + 1):
            measured, mean = epoch_of(job, prompts, epoch, options.samples)
            different += measured.different
            rate = measured.tokens / measured.plain_s, measured.tokens / measured.drafted_s
            acceptance = measured.accepted / max(1, measured.proposed)
            print(
                f"epoch {epoch}: reward {mean:.3f}; tokens/s {rate[0]:.0f} without history, {rate[1]:.0f} with: "
                f"x {measured.gain:.2f}; acceptance {acceptance:.2f}, "
                f"{measured.tokens / max(1, measured.verifications):.1f} tokens a verification; "
                f"{measured.different} responses differ",
                flush=True,
            )
            figures.append({**asdict(measured), "reward": mean, "gain": measured.gain})
    if options.json:
        with open(options.json, "w") as file:
            json.dump(figures, file)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
