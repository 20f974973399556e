"""Drafts of a history as a proposer of vLLM: `speculative_config={"method": "custom_class", "custom_proposer_backend":
"dataplane.integrations.drafting.vllm.HistoryProposer", "num_speculative_tokens": 32}`, according to its published
interface. The signatures were checked; it was never run in vLLM.

vLLM identifies requests to a proposer by their position in the batch and their tokens. The prompt is the tokens of a
row when its first tokens are sampled, and its key is their `prompt_key`: record responses under the same key. The
history is the one of $DATAPLANE_HISTORY ("rollouts" by default), on the node of $DATAPLANE_ADDRESS.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dataplane.history.drafter import Drafter
from dataplane.integrations.drafting import prompt_key

NAME = "DATAPLANE_HISTORY"


class _Request:
    """A row of the batch. `seen`: the number of its tokens that the drafter has."""

    def __init__(self, tokens: Any, prompt: int, drafter: Drafter) -> None:
        self.first, self.prompt, self.seen, self.drafter = np.array(tokens[:prompt]), prompt, prompt, drafter

    def goes_on(self, tokens: Any, length: int, sampled: Sequence[int]) -> bool:
        """Whether the row still belongs to the same request: since the last call, only sampled tokens were added."""
        return length - len(sampled) == self.seen and bool(np.array_equal(tokens[: self.prompt], self.first))


class HistoryProposer:
    """Proposes continuations of earlier responses to the same prompts."""

    def __init__(self, vllm_config: Any, drafter: Callable[[str], Drafter] | None = None) -> None:
        self._most = int(vllm_config.speculative_config.num_speculative_tokens)
        self._max_length = int(vllm_config.model_config.max_model_len)
        self._drafter = drafter or _from_the_plane()
        self._requests: dict[int, _Request] = {}

    def propose(
        self, sampled_token_ids: list[list[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, slot_mappings: Any = None
    ) -> list[list[int]]:
        """A draft for each request, empty if nothing is likely or nothing was sampled.

        sampled_token_ids: the tokens sampled in this step, by request. num_tokens_no_spec: the number of tokens of each
        request, including the sampled ones. token_ids_cpu: [requests, tokens], an array or a tensor on the host.
        """
        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            if not sampled or length >= self._max_length:
                drafts.append([])
                continue
            tokens = np.asarray(token_ids_cpu[row][:length])
            request = self._requests.get(row)
            if request is None or not request.goes_on(tokens, length, sampled):
                prompt = max(0, length - len(sampled))
                request = _Request(tokens, prompt, self._drafter(prompt_key(tokens[:prompt])))
                self._requests[row] = request
            request.drafter.accept(tokens[request.seen : length])
            request.seen = length
            drafts.append(request.drafter.propose(min(self._most, self._max_length - length - 1)))
        for row in [row for row in self._requests if row >= len(sampled_token_ids)]:
            del self._requests[row]
        return drafts

    def load_model(self, *_: Any, **__: Any) -> None:
        """Does nothing: there is no model."""


def _from_the_plane() -> Callable[[str], Drafter]:
    from dataplane import connect

    history = connect().history(os.environ.get(NAME, "rollouts"))
    return history.drafter
