"""verl's data set, with images taken from messages without the package of one model's maker."""

from __future__ import annotations

from typing import Any

from verl.utils.dataset.rl_dataset import RLHFDataset


class Data(RLHFDataset):
    @classmethod
    async def process_multi_modal_info(cls, messages: list[dict[str, Any]], **_: Any) -> tuple[Any, None, None]:
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        return [part["image"] for part in parts if part["type"] == "image"] or None, None, None
