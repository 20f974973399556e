"""`python -m bench.workloads`: how far the generator is from the tables, the worst of a few seeds, at several sizes.

The bound is 0.03 from 512 prompts on. Below, a sample of n values cannot be nearer than 1/2n to anything smooth.
"""

from __future__ import annotations

import sys

from bench.workloads import TASKS, distance
from dataplane.workloads import generate
from dataplane.workloads.tables import task

SIZES = (16, 128, 512, 2560)
SEEDS = range(5)
BOUND, BOUND_FROM = 0.03, 512

#: Sums of what other tables are of. It is drawn near its table, but what it is a sum of comes first.
SUMS = {"total_tokens"}


def worst(name: str, prompts: int) -> dict[str, float]:
    """By what a table is of, the largest distance over the seeds."""
    found: dict[str, float] = {}
    for seed in SEEDS:
        trace = generate(name, prompts=prompts // 16, steps=16, seed=seed)
        for column, made, other in distance.figures(trace):
            found[column] = max(found.get(column, 0.0), distance.distance(made, other))
    return found


def main() -> int:
    """Print the distances; 1 where one is beyond the bound."""
    failed = False
    print(f"{'two-sample KS distance, prompts:':<56}" + "".join(f"{n:>8,}" for n in SIZES))
    for name in TASKS:
        by_size = [worst(name, prompts) for prompts in SIZES]
        for column in by_size[0]:
            print(f"{name:<24}{column:<32}" + "".join(f"{found[column]:8.4f}" for found in by_size))
            large = [found[column] for n, found in zip(SIZES, by_size, strict=True) if n >= BOUND_FROM]
            failed |= column not in SUMS and max(large) > BOUND
    print(f"\n{'alike, of 10,240 prompts:':<58}{'table':>8}{'made':>8}")
    for name in TASKS:
        known = task(name).figures
        if "sibling_spearman" in known:
            for what, value in distance.alike(generate(name, prompts=640, steps=16), known["group_size"]).items():
                print(f"{name:<24}{what:<34}{known[what]:8.3f}{value:8.3f}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
