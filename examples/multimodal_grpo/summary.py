"""The summary of the job: a table of rows and bytes, and a plot of reward and memory over time."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from dataplane.config import format_size
from examples.multimodal_grpo.job import Job
from examples.multimodal_grpo.watch import MIB, Watch


def introduction(job: Job) -> str:
    """A text for newcomers: the processes, and the figures that they will see."""
    ranks = "a trainer" if job.ranks == 1 else f"{job.ranks} trainer ranks"
    rises = f" to {job.target:g}" if job.target < 1 else ""
    names = f"{len(job.pauses)} rollout workers, a reward worker and {ranks}"
    return f"""\
A policy learns to read handwritten digits by reinforcement (GRPO), on this machine's processors: about half a minute.
What runs: {names}, a process each. Rows go from one to the next by reference,
  through a stream in {job.memory} of shared memory, which a node holds. None of them sends another any pixels.
What to watch: reward, the share of right answers, rises{rises}; memory stays within {job.memory}.
  spilled: bytes that were written to disk since memory was full. They are read back when the trainer needs them.
  waits: how often a process had to wait for memory, since the trainer is slower than the rollouts: the limit at work.
At step {job.kill_at} a rollout worker is killed on purpose, and started again: no row is lost, and none comes twice.
"""


def meaning(job: Job, watch: Watch, picture: Path | None) -> str:
    """The first three lines of the result; `__main__` prints the other two."""
    steps = [step for _, step in watch.steps]
    stats = watch.samples[-1][1]
    sent, meant = sum(s.reference_bytes for s in steps), sum(s.logical_bytes for s in steps)
    shown = f"; the picture is {picture.absolute()}" if picture else ""
    return f"""
By reference: the trainer was sent {format_size(sent)}, and read in place what stands for {format_size(meant)}.
In bounded memory: at most {format_size(stats.memory_peak)} of {format_size(stats.memory_budget)}; \
{format_size(stats.spilled_bytes)} went to disk and {format_size(stats.restored_bytes)} came back.
Over time: {len(steps)} updates in {watch.seconds:.0f} s{shown}."""


def table(job: Job, watch: Watch) -> Table:
    """A table of the figures of a job that has made one step or more."""
    steps = [step for _, step in watch.steps]
    stats = watch.samples[-1][1]
    logical, stored = sum(s.logical_bytes for s in steps), sum(s.stored_bytes for s in steps)
    first = steps[: job.averaged]
    lag = sum(s.lag for s in steps) / len(steps)

    shown = Table(title="Multimodal GRPO over the data plane", show_header=False, title_justify="left")
    shown.add_column(style="bold")
    shown.add_column(justify="right")
    shown.add_column(style="dim")
    shown.add_row("batches", f"{len(steps)}", "used by the trainer")
    shown.add_row("rows learnt from", f"{sum(s.rows for s in steps):,}", f"{job.responses} responses a prompt")
    shown.add_row("logical", format_size(logical), "with its own pixels in every row")
    shown.add_row("stored", format_size(stored), f"1/{logical / stored:.2f}: pixels once a prompt")
    shown.add_row("sent to the trainer", format_size(sum(s.reference_bytes for s in steps)), "references, nothing else")
    shown.add_section()
    for killed in watch.killed:
        shown.add_row("killed", killed.process, f"at step {killed.step}, and started again")
    if watch.finished is not None:
        books = watch.finished.books
        shown.add_row("rows appended", f"{books.appended:,}", f"{books.left_out:,} left out")
        counted = sum(books.counted.values())
        shown.add_row("rows counted", f"{counted:,}", f"{books.again:,} of them twice")
        after = counted - sum(s.rows for s in steps)
        shown.add_row("  after the last update", f"{after:,}", "left in the stream at the end")
        for name, rows in books.counted.items():
            worker, _, life = name.partition(".")
            shown.add_row(f"  by rollout {worker}", f"{rows:,}", "after its restart" if int(life) else "")
    shown.add_section()
    shown.add_row("memory, peak", format_size(stats.memory_peak), f"of {format_size(stats.memory_budget)}")
    shown.add_row("spilled to disk", format_size(stats.spilled_bytes), f"of {format_size(stats.put_bytes)} put")
    shown.add_row("restored from disk", format_size(stats.restored_bytes), "")
    shown.add_row("waits for memory", f"{stats.waits}", f"{stats.waited_s:.1f} s, all processes together")
    shown.add_section()
    shown.add_row("reward, first", f"{sum(s.reward for s in first) / len(first):.3f}", f"{len(first)} batches")
    shown.add_row("reward, last", f"{steps[-1].average:.3f}", f"target {job.target:g}")
    if watch.finished is not None:
        examined = f"{watch.finished.examined} digits it had never seen"
        shown.add_row("right, held out", f"{watch.finished.accuracy:.1%}", examined)
    shown.add_row("policy lag", f"{lag:.1f}", "updates between answer and use")
    shown.add_row("time", f"{watch.seconds:.1f} s", "start included")
    return shown


def plot(job: Job, watch: Watch, path: Path) -> None:
    """Draw reward and memory over time as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), dpi=120, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    blue, orange, grey = "#2563a8", "#d9822b", "#666666"

    times = [t for t, _ in watch.steps]
    above.plot(times, [s.reward for _, s in watch.steps], ".", color=blue, alpha=0.3, markersize=4, label="a batch")
    mean = f"mean of {job.averaged}"
    above.plot(times, [s.average for _, s in watch.steps], color=blue, linewidth=2, label=mean)
    above.axhline(job.target, color=grey, linestyle="--", linewidth=1, label=f"target {job.target:g}")
    above.set(ylabel="reward", ylim=(0, 1.02), title="It learns to read digits …")
    above.legend(loc="lower right", frameon=False)

    times = [t for t, _ in watch.samples]
    stats = [s for _, s in watch.samples]
    used = [s.memory_used / MIB for s in stats]
    budget = stats[-1].memory_budget / MIB
    below.fill_between(times, used, color=blue, alpha=0.25, linewidth=0)
    below.plot(times, used, color=blue, linewidth=1, label="in memory")
    below.axhline(budget, color=grey, linestyle="--", linewidth=1, label=f"budget {budget:.0f} MiB")
    below.set(xlabel="seconds", ylabel="MiB in memory", ylim=(0, budget * 1.25), title="… in bounded memory")
    disk = below.twinx()
    disk.plot(times, [s.spilled_bytes / MIB / 1024 for s in stats], color=orange, linewidth=2, label="spilled, in all")
    disk.set_ylabel("GiB spilled", color=orange)
    disk.tick_params(axis="y", colors=orange)
    disk.set_ylim(bottom=0)
    lines = [*below.get_legend_handles_labels()[0], *disk.get_legend_handles_labels()[0]]
    below.legend(lines, [line.get_label() for line in lines], loc="upper left", ncols=3, frameon=False)
    below.set_xlim(left=0)
    for axes in (above, below, disk):
        axes.spines[["top"]].set_visible(False)
    figure.savefig(path)
