"""Stores the processed pixels of a prompt once, and passes a handle for them in place of the tensors.

    # agent.py, for --train.agent_func_path agent.py
    from openrlhf.utils.agent import SingleTurnAgentExecutor
    from dataplane.integrations.openrlhf import LazyInputs

    class AgentExecutor(LazyInputs, SingleTurnAgentExecutor):
        pass

OpenRLHF asks an executor for n samples of a prompt at once. It would run the processor for each sample, and send its
tensors to the controller n times. With the mixin `LazyInputs`, the processor runs once for equal text and pictures, its
result is put once, and a handle takes its place (`mm_train_inputs`), the same one for all samples with equal inputs.

The process that draws samples is OpenRLHF's PPOTrainer; with asynchronous training, its generator and then its
TrainingActor. It keeps a handle in an Experience. It drops the handle when a filter removes the sample, when an
evaluation ends, or when the step ends. A handle owns its inputs only if it was unpickled in this process: the inputs
are freed with the last sample of the prompt. Workers of the models receive plain handles (`remote`), which own nothing.

Invariants: the processor runs for each distinct combination of text, pictures and options; its result is kept only
while a sample of the prompt is being made; inputs of which no sample is left are freed. Pickling passes the ownership
to the process that unpickles the handle, so nothing is freed that a process may still read. If a pickled handle is
lost on the way, its inputs stay until the node ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Mapping
from typing import Any

import xxhash

from dataplane.batch.ref import BatchRef
from dataplane.batch.tensors import host_bits, is_tensor
from dataplane.integrations import process
from dataplane.integrations.rows import LazyRow, put_rows

#: The module that is imported in processes that draw samples from rollout workers, and in no others.
_DRAWS = "openrlhf.trainer.ppo_utils.samples_generator"


class LazyInputs:
    """A mixin of an `AgentExecutorBase`: `class AgentExecutor(LazyInputs, YourExecutor)`. Used by one event loop."""

    async def execute(
        self,
        prompt: Any,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> Any:
        """Call `execute` of the next class, the user's executor. Returns its result, with handles in place of inputs.
        Raises as that executor, and as `Plane.put`."""
        execute = super().execute  # type: ignore[misc]  # of the executor that it is mixed into
        if not images:
            return await execute(prompt, label, sampling_params, max_length, hf_tokenizer, llm_engine, images)
        # created here, because executors need not call `super().__init__()`
        prompts: dict[Any, _PromptState] = self.__dict__.setdefault("_prompts_in_the_making", {})
        key = prompt, _spelled(images), id(hf_tokenizer)
        shared = prompts.get(key) or prompts.setdefault(key, _PromptState(hf_tokenizer))
        shared.samples += 1
        try:
            response = await execute(prompt, label, sampling_params, max_length, shared.processor, llm_engine, images)
            inputs = response.get("mm_train_inputs")
            if isinstance(inputs, Mapping) and not isinstance(inputs, LazyRow):
                response = {**response, "mm_train_inputs": await shared.handle(inputs)}
            return response
        finally:
            shared.samples -= 1
            if not shared.samples:
                del prompts[key]


class _PromptState:
    """The shared state of the samples of a prompt, while one is being made: the results of the processor, and the
    handles of the stored inputs."""

    def __init__(self, processor: Any) -> None:
        self.samples = 0
        self.processor = _Processor(processor)
        self._handles: dict[bytes, OwnedRow] = {}
        self._digests: dict[Any, tuple[bytes, Any]] = {}  # by identity, of objects that are kept alive here
        self._putting = asyncio.Lock()

    async def handle(self, inputs: Mapping[str, Any]) -> OwnedRow:
        """The handle of inputs equal to these, which are put if they are new. Raises as `Plane.put`."""
        async with self._putting:
            same = tuple([(key, id(value)) for key, value in inputs.items()])
            if same not in self._digests:
                self._digests[same] = await asyncio.to_thread(_content, dict(inputs)), inputs
            digest, _ = self._digests[same]
            if digest not in self._handles:
                self._handles[digest] = await asyncio.to_thread(_put, dict(inputs))
            return self._handles[digest]


def _put(inputs: dict[str, Any]) -> OwnedRow:
    """The handle of stored inputs, which are freed with it until it is sent, even if no task waits for it any more."""
    (row,) = put_rows([inputs])
    assert row is not None, "inputs are no None"
    owned = OwnedRow(row.ref, row.column)
    owned.own()
    return owned


class _Processor:
    """A processor that makes calls with equal text, pictures and options once."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._made: dict[bytes, Any] = {}

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if options.get("images") is None or arguments:
            return self._processor(*arguments, **options)
        key = _content(options)
        if key not in self._made:
            self._made[key] = self._processor(**options)
        return self._made[key]

    def __getattr__(self, name: str) -> Any:
        if name == "_processor":  # a copy in the making
            raise AttributeError(name)
        return getattr(self._processor, name)


def _spelled(images: Any) -> Any:
    """References to pictures, as a key: a value that is not text is its own key."""
    several = images if isinstance(images, list) else [images]
    return tuple([each if isinstance(each, str | bytes | None) else id(each) for each in several])


def _content(value: Any) -> bytes:
    """A key that is equal for equal contents: text, pictures, tensors, options."""
    digest = xxhash.xxh3_128()
    _feed(digest, value)
    return digest.digest()


def _feed(digest: Any, value: Any) -> None:
    digest.update(f"{type(value).__qualname__}:".encode())
    if isinstance(value, Mapping):
        for key, item in value.items():
            digest.update(f"{key!r}=".encode())
            _feed(digest, item)
    elif isinstance(value, list | tuple):
        digest.update(f"{len(value)}:".encode())
        for item in value:
            _feed(digest, item)
    elif is_tensor(value):
        name, bits = host_bits("inputs", value)
        digest.update(f"{name}{bits.shape}:".encode())
        digest.update(bits.tobytes() if not bits.flags.c_contiguous else bits.data)
    elif hasattr(value, "tobytes"):  # a picture, an array
        digest.update(
            f"{getattr(value, 'mode', '')}{getattr(value, 'size', '')}{getattr(value, 'dtype', '')}:".encode()
        )
        digest.update(value.tobytes())
    else:
        digest.update(f"{value!r};".encode())


class OwnedRow(LazyRow):
    """A handle that a rollout worker sends."""

    __slots__ = ("_watch",)

    def __init__(self, ref: BatchRef, column: str) -> None:
        """As `LazyRow`; it owns nothing yet."""
        super().__init__(ref, column)
        self._watch: process.Watch | None = None

    @property
    def owning(self) -> bool:
        """Whether its inputs are freed with it."""
        return self._watch is not None and self._watch.active

    def own(self) -> None:
        """Own the inputs: they are freed with this object. Idempotent."""
        if not self.owning:
            self._watch = process.Watch(self.ref, [self])

    def give_away(self) -> None:
        """Leave the inputs to another owner. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()

    def __reduce__(self) -> tuple[Callable[[bytes, str], OwnedRow], tuple[bytes, str]]:
        self.give_away()
        return _arrived, (self.ref.encode(), self.column)


def _arrived(ref: bytes, column: str) -> OwnedRow:
    row = OwnedRow(BatchRef.decode(ref), column)
    if _DRAWS in sys.modules:
        row.own()
    return row
