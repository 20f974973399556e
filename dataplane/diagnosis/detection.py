"""Detects anomalies: processes that are slower than others of their role, times that differ between rounds, and
vertices whose time does not scale.

The times of a process between calls of the plane are counted by powers of two (`recorder`); their median is a usual
round. The spread of the time at a line shows how unequal rounds are. If unequal times correlate with the sizes of the
columns, rows are skewed; otherwise the distribution has a tail.

Pure functions of a `graph.GraphRun`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from dataplane.diagnosis.graph import CallSiteRecord, GraphRun, Index, Line, ProcessNode
from dataplane.diagnosis.recorder import GAP_S, RATE

STRAGGLES = 1.5
"""The ratio to other processes of the role from which a process is reported. In Mantri (Ananthanarayanan et al., OSDI
2010), outliers take 1.5 times the median, too."""
UNEQUAL = math.sqrt(0.5)
"""The coefficient of variation c from which times are unequal. The wait in a queue is proportional to 1 + c**2
(Pollaczek and Khinchine), so that variation causes a third of the wait or more."""
FOLLOWS = math.sqrt(0.5)
"""The correlation from which times depend on sizes, which then explain half of the variance."""
SURE = 2.5
"""The number of standard errors from which a difference is significant. Chance exceeds it once in 160 cases."""
_FEW = 6  # rounds below which no spread or correlation is computed
_ROUNDS = 3  # rounds below which no usual time is computed
_MEDIAN = 1.25  # the standard error of a median over that of a mean, for a normal distribution
_LEAST_SPREAD = 0.3  # the deviation, in powers of two, of times that are all in one bucket


def median_s(place: CallSiteRecord) -> float:
    """The median time before calls of this place, in seconds, interpolated within its power of two. 0 without times."""
    half, seen = sum(place.gaps) / 2, 0
    for i, count in enumerate(place.gaps):
        if count and seen + count >= half:
            low, high = (0.0 if i == 0 else GAP_S * 2.0 ** (i - 1)), GAP_S * 2.0**i
            return low + (high - low) * (half - seen) / count
        seen += count
    return 0.0


def deviation(lines: Iterable[tuple[Line, int]]) -> float:
    """The coefficient of variation of the time at these lines in a round. Each line comes with the rounds of its
    process. 0 for fewer than `_FEW` rounds. The variance of the sampling, about an interval for each sample, is
    subtracted."""
    sums = [(n, line.seconds, line.squares) for line, n in lines]
    n, seconds, squares = (sum(each[i] for each in sums) for i in range(3))
    if n < _FEW or seconds <= 0:
        return 0.0
    mean = seconds / n
    return math.sqrt(max(0.0, squares / n - mean * mean - mean / RATE)) / mean


def correlation(place: CallSiteRecord) -> float:
    """The correlation (Pearson) of the time before calls of this place and the size of their columns. 0 for equal or
    few sizes."""
    if not place.sized or place.sized[0] < _FEW:
        return 0.0
    n, size, sizes, seconds, squares, products = place.sized
    spread = (n * sizes - size * size) * (n * squares - seconds * seconds)
    return (n * products - size * seconds) / math.sqrt(spread) if spread > 1e-12 else 0.0


def round_s(process: ProcessNode) -> float:
    """The median time of a round of the process outside of the plane, in seconds; 0 if unknown."""
    main = process.main
    return median_s(main) if main is not None and sum(main.gaps) >= _ROUNDS else 0.0


@dataclass(frozen=True, slots=True)
class Odd:
    """Processes that take at least `ratio` times as long as others of their role. `host`: whether their host is the
    reason. `lost`: the share of the role's capacity that this costs."""

    processes: frozenset[tuple[str, int]]
    ratio: float
    host: bool
    lost: float


def odd(index: Index, role: str) -> Odd | None:
    """The processes of a role that take longer than the others. None without any, or if most do."""
    taken = {process.key: round_s(process) for process in index.by_role[role]}
    taken = {key: seconds for key, seconds in taken.items() if seconds > 0}
    if len(taken) < 2:
        return None
    slow = {key for key in taken if _differs(index, taken, key)}
    if not slow or 2 * len(slow) > len(taken):
        return None
    ratio = min(taken[key] / _others(taken, key) for key in slow)
    hosts = {index.by_key[key].host for key in slow}
    usual = statistics.median(seconds for key, seconds in taken.items() if key not in slow)
    lost = 1.0 - sum(1.0 / seconds for seconds in taken.values()) * usual / len(taken)
    if _in_step(index, role):
        lost = 1.0 - 1.0 / ratio
    is_host = len(hosts) == 1 and _is_host(index, role, hosts.pop(), slow)
    return Odd(frozenset(slow), ratio, is_host, max(0.0, lost))


def _differs(index: Index, taken: dict[tuple[str, int], float], key: tuple[str, int]) -> bool:
    """Whether a process takes `STRAGGLES` times as long as others of its role, beyond the variation of rounds: the
    difference of medians, in powers of two, against its standard error."""
    ratio = taken[key] / _others(taken, key)
    if ratio < STRAGGLES:
        return False
    own = _spread(index.by_key[key].main)
    others = [_spread(index.by_key[other].main) for other in taken if other != key]
    error = _MEDIAN * math.sqrt(own[0] ** 2 / own[1] + max(spread**2 / rounds for spread, rounds in others))
    return math.log2(ratio) > SURE * error


def _spread(place: CallSiteRecord | None) -> tuple[float, int]:
    """The standard deviation of the times before calls of a place, in powers of two, and the number of times."""
    counts = [] if place is None else place.gaps
    rounds = sum(counts)
    if not rounds:
        return _LEAST_SPREAD, 1
    mean = sum(i * count for i, count in enumerate(counts)) / rounds
    square = sum(count * (i - mean) ** 2 for i, count in enumerate(counts)) / rounds
    return max(_LEAST_SPREAD, math.sqrt(square)), rounds


def _in_step(index: Index, role: str) -> bool:
    """Whether the processes of a role have the same pace, because each waits for the slowest."""
    rounds = [process.rounds for process in index.by_role[role]]
    return min(rounds) > 0.6 * max(rounds)


def _others(taken: dict[tuple[str, int], float], key: tuple[str, int]) -> float:
    """The median time of the processes other than this one."""
    return statistics.median_low(seconds for other, seconds in taken.items() if other != key)


def _is_host(index: Index, role: str, host: str, slow: set[tuple[str, int]]) -> bool:
    """Whether the host is the reason. All its processes of this role are slow, and they are several, or another role's
    are slow too."""
    here = [process for process in index.by_role[role] if process.host == host]
    if not all(process.key in slow for process in here) or len(here) == len(index.by_role[role]):
        return False
    if len(here) > 1:
        return True
    for other, processes in index.by_role.items():
        taken = {process.key: round_s(process) for process in processes}
        there = [taken[p.key] for p in processes if p.host != host and taken[p.key] > 0]
        mine = [taken[p.key] for p in processes if p.host == host and taken[p.key] > 0]
        if other != role and there and mine and min(mine) > STRAGGLES * statistics.median(there):
            return True
    return False


@dataclass(frozen=True, slots=True)
class Scaling:
    """The change of a line's time with the number of processes. `slope`: of its seconds per step and process in
    log-log, -1 for perfect scaling. `lost_s`: its seconds a step beyond that."""

    role: str
    file: str
    line: int
    slope: float
    lost_s: float


def scaling(small: GraphRun, large: GraphRun, steps: tuple[float, float]) -> dict[tuple[str, str, int], Scaling]:
    """By role, file and line of the larger run: how its time scales with the number of processes (Jin et al. 2020,
    section IV-A). `steps`: of both runs. Empty for equal numbers of processes."""
    before, after = Index(small), Index(large)
    grown = math.log(max(len(large.processes), 1) / max(len(small.processes), 1))
    found = {}
    now, then = _seconds(after, steps[1]), _seconds(before, steps[0])
    for key, seconds in now.items():
        was = then.get(key, 0.0)
        if grown <= 0 or seconds <= 0:
            continue
        slope = math.log(seconds / was) / grown if was > 0 else math.inf
        lost_s = seconds - was * len(small.processes) / len(large.processes)
        found[key] = Scaling(*key, slope, max(0.0, lost_s))
    return found


def _seconds(index: Index, steps: float) -> dict[tuple[str, str, int], float]:
    """By role, file and line: the seconds per step and process, in own code and in calls."""
    found: dict[tuple[str, str, int], float] = {}
    for role, processes in index.by_role.items():
        for process in processes:
            taken = [(each.file, each.line, each.seconds) for each in process.lines]
            taken += [(each.file, each.line, each.seconds) for each in process.places]
            for file, line, seconds in taken:
                key = (role, file, line)
                found[key] = found.get(key, 0.0) + seconds / len(processes) / max(steps, 1.0)
    return found
