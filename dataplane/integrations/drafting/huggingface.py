"""Drafts of a history in Hugging Face's `generate`: the model verifies each, so its outputs are its own.

`generate` takes candidates when it decodes with assistance: one response at a time (it is limited to batches of one),
with a cache that can be cropped. With `do_sample` it samples from the model's distribution at each position, and keeps
the tokens of a draft up to the first that differs from the sample. So the distribution is the model's, but not the same
random numbers are used as without drafts. With `SeededSampling` the tokens are the same with and without drafts,
because a sample depends only on the seed and the position.

Checked with transformers 5.10. Raises ImportError with the name of the package if transformers is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dataplane.history.drafter import LONGEST, Drafter

if TYPE_CHECKING:
    import torch

try:
    from transformers import LogitsProcessor
    from transformers.generation.candidate_generator import CandidateGenerator
except ImportError as error:
    raise ImportError(
        "drafts for `generate` need transformers: pip install 'rollout-dataplane[huggingface]'"
    ) from error


class HistoryCandidates(CandidateGenerator):  # type: ignore[misc, unused-ignore]
    """Candidates from a new drafter, for one call of `generate`."""

    def __init__(self, drafter: Drafter, *, max_length: int, eos: Any = ()) -> None:
        self._drafter = drafter
        self._max_length = max_length
        self._eos = frozenset(int(token) for token in eos)
        self._seen = -1

    def get_candidates(self, input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """(candidates, None): the input ids, int64 [1, length], followed by the draft tokens; no logits."""
        import torch

        self.learn(input_ids)
        draft = self._drafter.propose(self._max_length - input_ids.shape[1] - 1)
        for at, token in enumerate(draft):
            if token in self._eos:
                draft = draft[: at + 1]
                break
        more = torch.tensor([draft], dtype=input_ids.dtype, device=input_ids.device)
        return (torch.cat([input_ids, more], dim=1) if draft else input_ids), None

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: int) -> None:
        """Does nothing: the accepted tokens are part of the next input."""

    def learn(self, input_ids: torch.Tensor) -> None:
        """Pass the tokens since the last call to the drafter. The first call only notes the length of the prompt."""
        length = input_ids.shape[1]
        if self._seen >= 0 and length > self._seen:
            self._drafter.accept(input_ids[0, self._seen :].cpu().numpy())
        self._seen = length


@contextmanager
def drafting(model: Any, drafter: Drafter) -> Iterator[list[HistoryCandidates]]:
    """A context in which `model.generate(..., prompt_lookup_num_tokens=1)` gets its candidates from the drafter. For
    one call, and one thread."""
    made: list[HistoryCandidates] = []

    def candidates(*_: Any, generation_config: Any, **__: Any) -> HistoryCandidates:
        eos = generation_config._eos_token_tensor
        found = HistoryCandidates(
            drafter, max_length=generation_config.max_length, eos=() if eos is None else eos.flatten().tolist()
        )
        made.append(found)
        return found

    model._get_candidate_generator = candidates
    try:
        yield made
    finally:
        del model._get_candidate_generator


def generate(model: Any, input_ids: torch.Tensor, drafter: Drafter, **how: Any) -> Any:
    """`model.generate(input_ids, **how)` with the drafter's drafts: the same tokens with greedy decoding or
    `SeededSampling`, else the same distribution. input_ids: [1, length].

    Raises ValueError, as `generate`, for batches of several.
    """
    with drafting(model, drafter) as made:
        found = model.generate(input_ids, prompt_lookup_num_tokens=LONGEST, **how)
    sequences = found if not hasattr(found, "sequences") else found.sequences
    for each in made:
        each.learn(sequences)
    return found


class SeededSampling(LogitsProcessor):  # type: ignore[misc, unused-ignore]
    """Sampling by which a token depends only on the model, the seed and its position: the argmax of the scores with
    Gumbel noise is a sample of their softmax (Gumbel 1954), and greedy decoding takes it. Use with `do_sample=False`.

    temperature: the divisor of the scores, above 0.
    """

    def __init__(self, seed: int, temperature: float = 1.0) -> None:
        if not temperature > 0:
            raise ValueError(f"a temperature is above 0, not {temperature}")
        self._seed, self._temperature = seed, temperature

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores with noise: [rows, vocabulary]."""
        import torch

        source = torch.Generator().manual_seed((self._seed * 1_000_003 + input_ids.shape[1]) & ((1 << 63) - 1))
        waits = torch.empty(scores.shape, dtype=torch.float32).exponential_(generator=source).to(scores.device)
        return scores / self._temperature - waits.log()
