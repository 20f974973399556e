"""The language model's server: token ids from the prompt and a seed, and nothing else. Imports neither torch nor verl,
so that its process is there at once.

What always holds: the tokens of a response follow from those before it, so that one that was cut and resumed has the
tokens that it would have had. A response to a prompt with the token `cut_token` is held after `CUT_AFTER` tokens, and
none is shorter, while the server has the weights that the run began with, until the trainer aborts it: so a partial
rollout happens by the trainer's doing, and by no clock. One that is aborted where weights stay as they are, and resumed
elsewhere, is held there with the tokens that it has.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from . import hang

CUT_AFTER = 2
hang.watch_if_asked()


class Server:
    """One replica's. Requests wait while it sleeps, or while the trainer holds it.

    words: the ids that a response is made of; eos: the id that ends it.
    """

    def __init__(self, words: Sequence[int], eos: int, length: int, cut_token: int | None) -> None:
        self._words, self._eos, self._length, self._cut_token = words, eos, length, cut_token
        self._awake, self._resumed, self._aborted = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._resumed.set()
        self._rejecting = False
        self._steps = self._began = -1
        self._updates = 0.0

    async def generate(
        self,
        *,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        **_: Any,
    ) -> SimpleNamespace:
        if self._rejecting:
            return self._output([], "aborted")
        while not (self._awake.is_set() and self._resumed.is_set()):
            await self._awake.wait()
            await self._resumed.wait()
        seed = zlib.crc32(repr(sampling_params["seed"]).encode())
        for image in image_data or ():
            seed = zlib.crc32(image.tobytes(), seed)
        limit = sampling_params.get("max_tokens", self._length)
        held = self._cut_token in prompt_ids and self._steps == self._began and sampling_params["temperature"] > 0
        there = len(list(itertools.takewhile(self._words.__contains__, reversed(prompt_ids))))  # of a resumed one
        tokens: list[int] = []
        while len(tokens) < limit and self._eos not in tokens[-1:]:
            made = there + len(tokens)
            if held and made >= CUT_AFTER:
                await self._aborted.wait()
                return self._output(tokens, "aborted")
            drawn = zlib.crc32(repr([*prompt_ids, *tokens]).encode(), seed) >> 3
            ends = len(tokens) == limit - 1 or (made >= CUT_AFTER and drawn % 5 == 0)
            tokens.append(self._eos if ends else self._words[drawn % len(self._words)])
        return self._output(tokens, "completed")

    def _output(self, tokens: list[int], why: str) -> SimpleNamespace:
        return SimpleNamespace(
            token_ids=tokens,
            log_probs=[-(token % 16) / 16 for token in tokens],
            routed_experts=None,
            stop_reason=why,
            num_preempted=0,
            extra_fields={"global_steps": self._steps, "updates": self._updates},
        )

    async def set_weights(self, updates: float, steps: int | None) -> None:
        """The trainer's updates so far, which change no tokens and are said with them, and its step."""
        self._updates = updates
        if steps is not None:
            self._began = steps if self._began < 0 else self._began
            self._steps = steps

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        if "kv_cache" in tags or not tags:
            self._awake.set()

    async def sleep(self) -> None:
        self._awake.clear()

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self._rejecting = reject_request
        self._resumed.clear()
        self._aborted.set()

    async def resume_generation(self) -> None:
        self._rejecting = False
        self._aborted.clear()
        self._resumed.set()

    async def clear_kv_cache(self) -> None: ...

    async def release_kv_cache(self) -> None: ...

    async def resume_kv_cache(self) -> None: ...


class Mail:
    """Where an actor's ranks leave their weights for servers that share no process with them."""

    def __init__(self) -> None:
        self._sent: dict[int, float] = {}
        self._arrived = asyncio.Condition()

    async def send(self, steps: int, updates: float) -> None:
        async with self._arrived:
            self._sent[steps] = updates
            self._arrived.notify_all()

    async def receive(self, steps: int) -> float:
        async with self._arrived:
            await self._arrived.wait_for(lambda: steps in self._sent)
            return self._sent[steps]
