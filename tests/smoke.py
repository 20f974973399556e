"""That an installed distribution works: it is imported, starts a node, and passes batches between two processes.

    python tests/smoke.py               # of this checkout
    python tests/smoke.py --installed   # refuses what is imported from this checkout, and needs the extensions

Needs nothing but the distribution.
"""

from __future__ import annotations

import multiprocessing
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import dataplane as dp

EXTENSIONS = (
    *("batch._memory", "batch._lists", "diagnosis._calls", "history._suffix", "observe._writer", "pipeline._events"),
    "weights._sparse",
)


def score(refs: Any, rewards: Any) -> None:
    """The other process: read a batch by reference, and answer with one."""
    with dp.connect() as plane:
        rewards.put(plane.put({"reward": plane.get(refs.get()).to_dict()["x"]}))


def main() -> None:
    """Raises where something does not work."""
    if "--installed" in sys.argv:
        assert Path(dp.__file__).parents[1] != Path(__file__).resolve().parents[1], dp.__file__
        for name in EXTENSIONS:
            __import__(f"dataplane.{name}")
    assert metadata.version("rollout-dataplane") == dp.__version__
    context = multiprocessing.get_context("spawn")
    refs, rewards = context.Queue(), context.Queue()
    worker = context.Process(target=score, args=(refs, rewards))
    with dp.connect(config=dp.NodeConfig(memory="64MiB", spill=0, prewarm=0)) as plane:
        worker.start()
        pixels = plane.put({"pixels": np.arange(1 << 21)})
        refs.put(plane.put({"x": [1, 2, 3]}))
        assert plane.get(rewards.get(timeout=60))["reward"].to_list() == [1, 2, 3]
        assert int(plane.get(pixels)["pixels"].numpy()[-1]) == (1 << 21) - 1
        rollouts = plane.stream("rollouts", tasks=["actor"])
        rollouts.append({"text": ["a", "b"]}, group=["p", "p"])
        with rollouts.consume("actor", rows=2, columns=["text"], sampler=dp.CompleteGroups(2)) as delivery:
            assert delivery.get()["text"].to_list() == ["a", "b"]
        worker.join(60)
    sys.stdout.write(f"rollout-dataplane {dp.__version__} works, from {Path(dp.__file__).parent}\n")


if __name__ == "__main__":
    main()
