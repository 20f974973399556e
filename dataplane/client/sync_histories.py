"""The synchronous face of histories: each call waits for the asynchronous one's coroutine. It adds no logic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataplane.batch.ref import BatchRef
from dataplane.client import histories
from dataplane.client.sync_streams import Stream, Wait
from dataplane.client.tables import TIMEOUT_S
from dataplane.history.drafter import LONGEST, Drafter, Response
from dataplane.history.lengths import Lengths
from dataplane.history.scheduling import Schedule


class History:
    """See `dataplane.client.histories.AsyncHistory`; here each call waits. Any thread may use it."""

    def __init__(self, inner: histories.AsyncHistory, wait: Wait) -> None:
        self._inner = inner
        self._wait = wait

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def name(self) -> str:
        """The name of the history."""
        return self._inner.name

    def add(
        self, key: str, tokens: Any, *, epoch: int = 0, reward: float | None = None, timeout: float = TIMEOUT_S
    ) -> None:
        """A response to the prompt of this key. See `AsyncHistory.add`."""
        self._wait(self._inner.add(key, tokens, epoch=epoch, reward=reward, timeout=timeout))

    def record(
        self,
        ref: BatchRef,
        *,
        key: str | Sequence[str] = "key",
        tokens: str = "response_ids",
        epoch: int | Sequence[int] = 0,
        reward: str | Sequence[float | None] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        """The responses that these rows are, by reference. See `AsyncHistory.record`."""
        self._wait(self._inner.record(ref, key=key, tokens=tokens, epoch=epoch, reward=reward, timeout=timeout))

    def follow(
        self,
        stream: Stream,
        *,
        task: str = "history",
        tokens: str = "response_ids",
        key: str | None = None,
        reward: str | None = None,
        rows: int = 256,
    ) -> int:
        """Record the rows of a stream as they are done, until it closes; how many. See `AsyncHistory.follow`."""
        inner = stream._inner
        return self._wait(self._inner.follow(inner, task=task, tokens=tokens, key=key, reward=reward, rows=rows))

    def following(self, **how: Any) -> histories.Following:
        """The `history` argument of `plane.stream`, for a stream with other columns. See `AsyncHistory.following`."""
        return self._inner.following(**how)

    def known(self, keys: Sequence[str]) -> list[list[histories.StoredResponse]]:
        """The metadata of the responses to each of these prompts. See `AsyncHistory.known`."""
        return self._wait(self._inner.known(keys))

    def responses(self, key: str) -> list[Response]:
        """The responses that there are to this prompt. See `AsyncHistory.responses`."""
        return self._wait(self._inner.responses(key))

    def drafter(self, key: str, *, max_tokens: int = LONGEST) -> Drafter:
        """A drafter for a new response to this prompt. See `AsyncHistory.drafter`."""
        return self._wait(self._inner.drafter(key, max_tokens=max_tokens))

    def lengths(self, keys: Sequence[str]) -> Lengths:
        """How long responses to these prompts will be. See `AsyncHistory.lengths`."""
        return self._wait(self._inner.lengths(keys))

    def schedule(
        self, keys: Sequence[str], workers: int, *, step: int = 0, samples: int = 1, slots: int | None = None
    ) -> Schedule:
        """Which worker makes which of these prompts' responses. See `AsyncHistory.schedule`."""
        return self._wait(self._inner.schedule(keys, workers, step=step, samples=samples, slots=slots))

    def drop(self) -> None:
        """All responses go."""
        self._wait(self._inner.drop())
