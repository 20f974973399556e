"""vLLM's proposer interface, as far as it can be held without vLLM: its arguments, and what it does with a batch."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import numpy as np

from dataplane.history.drafter import Drafter, Response
from dataplane.integrations.drafting import prompt_key
from dataplane.integrations.drafting.vllm import HistoryProposer

#: Of `vllm.v1.spec_decode.custom_class_proposer`, which calls it by these names.
PUBLISHED = ["self", "sampled_token_ids", "num_tokens_no_spec", "token_ids_cpu", "slot_mappings"]


class Batch:
    """Requests as vLLM lays them out."""

    def __init__(self, proposer: HistoryProposer) -> None:
        self.proposer, self.tokens, self.lengths = proposer, np.zeros((4, 64), np.int32), np.zeros(4, np.int32)

    def begin(self, row: int, prompt: list[int]) -> None:
        self.tokens[row], self.lengths[row] = 0, len(prompt)
        self.tokens[row, : len(prompt)] = prompt

    def step(self, sampled: list[list[int]]) -> list[list[int]]:
        for row, tokens in enumerate(sampled):
            self.tokens[row, self.lengths[row] : self.lengths[row] + len(tokens)] = tokens
            self.lengths[row] += len(tokens)
        return self.proposer.propose(sampled, self.lengths, self.tokens)


def proposer(history: dict[str, list[int]], most: int = 3, length: int = 64) -> HistoryProposer:
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        model_config=SimpleNamespace(max_model_len=length),
    )

    def drafter(key: str) -> Drafter:
        return Drafter([Response(np.array(history[key], np.int32))] if key in history else [])

    return HistoryProposer(config, drafter)


def test_the_proposer_signature_is_that_of_vllm() -> None:
    assert list(inspect.signature(HistoryProposer.propose).parameters) == PUBLISHED
    assert list(inspect.signature(HistoryProposer.__init__).parameters)[1] == "vllm_config"
    assert callable(HistoryProposer.load_model)


def test_each_request_is_drafted_from_its_own_prompt() -> None:
    history = {prompt_key([1, 2]): [10, 11, 12, 13, 14, 15], prompt_key([3]): [20, 21, 22]}
    batch = Batch(proposer(history))
    batch.begin(0, [1, 2])
    batch.begin(1, [3])
    batch.begin(2, [9, 9])
    assert batch.step([[10], [20], [5]]) == [[11, 12, 13], [21, 22], []]
    assert batch.step([[11, 12], [], [6]]) == [[13, 14, 15], [], []]
    batch.begin(0, [3])  # another request in its place
    assert batch.step([[20], [21], [7]])[0] == [21, 22]
    assert batch.step([[21]]) == [[22]]
