"""The reward: how many letters of a response the ground truth has, and extras of several kinds."""

from __future__ import annotations

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, Any]:
    hits = sum(letter in ground_truth for letter in solution_str)
    return {"score": hits / 4, "acc": hits > 1, "letters": len(solution_str), "said": solution_str}
