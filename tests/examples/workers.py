"""What a process of a test runs, apart from the tests: who runs it need not import torch with them."""

from __future__ import annotations

import io
from multiprocessing.connection import Connection
from pathlib import Path

from rich.console import Console

from examples.multimodal_grpo import crew
from examples.multimodal_grpo.job import Job
from examples.multimodal_grpo.watch import Watch
from tests import torches


def live(directory: Path, life: int, steps: int | None, told: Connection) -> None:
    """A life of a small job, which says how many updates it made, and the count."""
    torches.warm()
    crew.CONTEXT = torches.torches
    small = {
        "memory": "32MiB",
        "in_flight": "24MiB",
        "smallest": 56,
        "largest": 84,
        "pauses": (0.0,),
        "prompts": 4,
        "seconds": 400,
    }
    job = Job(data_dir=str(directory), spill_dir=str(directory), life=life, steps=steps, target=0.0, **small)
    with Watch(job, Console(file=io.StringIO())) as watch:
        crew.run(job, watch)
    told.send((len(watch.steps), watch.failed, watch.finished and watch.finished.books))
