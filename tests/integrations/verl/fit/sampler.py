"""verl's replay buffers, which look more often, and record what they sample: keys and tags, and validation's rows."""

from __future__ import annotations

from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1 import replay_buffer

from fit import record  # verl loads this file by its path

POLL_S = 0.1


class _Recording:
    def __init__(self, **named: Any) -> None:
        super().__init__(**named, poll_interval=POLL_S)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        batch, metrics = super().sample(global_steps, partition_id, batch_size)
        record.sampled(partition_id, global_steps, batch.keys, batch.tags)
        if partition_id == "val" and record.asked():
            record.rows("validation", tq.kv_batch_get(keys=batch.keys, partition_id=partition_id))
        return batch, metrics


class Buffer(_Recording, replay_buffer.ReplayBuffer): ...


class BufferAsync(_Recording, replay_buffer.ReplayBufferAsync): ...
