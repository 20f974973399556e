"""`python -m examples.multimodal_grpo`: run the job, show its progress, and report whether it reached its target."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import dataplane as dp
from examples.multimodal_grpo import crew, summary
from examples.multimodal_grpo.job import Job
from examples.multimodal_grpo.watch import Watch


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 if the target was reached, 1 if not, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    job = Job(
        memory=options.memory,
        spill_dir=options.spill_dir,
        target=options.target,
        steps=options.steps,
        seconds=options.seconds,
        seed=options.seed,
        ranks=options.ranks,
        data_dir=options.data_dir,
        life=options.life,
    )
    console = Console()
    if not job.life:
        console.print(summary.introduction(job), highlight=False, soft_wrap=True)
    watch = Watch(job, console)
    interrupted = False
    try:
        with watch:
            crew.run(job, watch)
    except KeyboardInterrupt:
        interrupted = True
    except (dp.DataplaneError, ValueError) as error:
        console.print(f"[red]The plane failed:[/] {error}")
        return 1

    if watch.steps:
        console.print(summary.table(job, watch))
        if options.plot:
            summary.plot(job, watch, options.plot)
        console.print(summary.meaning(job, watch, options.plot), highlight=False, soft_wrap=True)
    if interrupted:
        console.print("Interrupted. Everything is stopped.")
        return 130
    return _verdict(job, watch, console)


def _verdict(job: Job, watch: Watch, console: Console) -> int:
    if watch.failed is not None:
        console.print(f"[red]The {watch.failed.process} failed.[/] Everything is stopped.")
        console.print(watch.failed.error, markup=False, highlight=False)
        return 1
    average = 0.0
    if watch.finished is not None:
        average, books = watch.finished.average, watch.finished.books
        counted = sum(books.counted.values())
        said = f"{books.appended:,} rows appended = {counted:,} counted by the trainer + {books.left_out:,} left out"
        if not books.exact:
            console.print(
                f"[red]The count is wrong:[/] {said}; {books.again:,} counted twice.", highlight=False, soft_wrap=True
            )
            return 1
        console.print(f"[green]The count is exact:[/] {said}, none twice.", highlight=False, soft_wrap=True)
    if average < job.target:
        console.print(f"[red]The reward is {average:.3f}, and the target {job.target:g} was not reached.[/]")
        return 1
    console.print(f"[green]The reward is {average:.3f}: the target {job.target:g} is reached.[/]")
    return 0


def _parser() -> argparse.ArgumentParser:
    usual = Job()
    parser = argparse.ArgumentParser("python -m examples.multimodal_grpo", description=__doc__.partition(": ")[2])
    parser.add_argument("--memory", default=usual.memory, help="the plane's memory budget (%(default)s)")
    parser.add_argument("--spill-dir", metavar="DIR", help="directory of spill files (the node's default)")
    parser.add_argument(
        "--data-dir",
        metavar="DIR",
        help="directory of the durable stream and of the trainer's state; not durable if not given",
    )
    parser.add_argument(
        "--life", type=int, default=usual.life, help="number of earlier starts with --data-dir (%(default)s)"
    )
    parser.add_argument("--target", type=float, default=usual.target, help="mean reward to reach (%(default)s)")
    parser.add_argument("--steps", type=int, help="stop after this number of steps")
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="stop after this time (%(default)s)")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--ranks", type=int, default=usual.ranks, help="processes that train together (%(default)s)")
    parser.add_argument("--plot", type=Path, metavar="PNG", default=Path("multimodal_grpo.png"), help="(%(default)s)")
    parser.add_argument("--no-plot", dest="plot", action="store_const", const=None, help="draw nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
