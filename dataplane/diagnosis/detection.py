"""What is abnormal: processes that differ from those alike, times that differ from round to round, and vertices whose
time does not scale.

Processes are alike that have the same role. What a process does between calls of the plane is known by powers of two
(`recorder`): its median is what a round usually takes, and the mean beside it how unequal rounds are. Where the times
follow the sizes of what is brought, rows are skewed; where they do not, something has a tail.

Pure: of a `graph.Run` alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from dataplane.diagnosis.graph import Index, Line, Place, Process, Run
from dataplane.diagnosis.recorder import GAP_S, RATE

STRAGGLES = 1.5
"""How many times as long as those alike a process takes that is named for it: as in Mantri (Ananthanarayanan et al.,
OSDI 2010), whose outliers take 1.5 times the median."""
UNEQUAL = math.sqrt(0.5)
"""From which standard deviation on, as a part of the mean, times are unequal: who queues for such work waits in
proportion to 1 + c**2 (Pollaczek and Khinchine), so that from here on a third of the wait is the inequality's."""
FOLLOWS = math.sqrt(0.5)
"""From which correlation on times follow sizes: those explain half of the variance."""
SURE = 2.5
"""Standard errors from which on a difference is not taken for chance, which goes so far once in 160 times."""
_FEW = 6  # rounds of whose spread nothing is said
_ROUNDS = 3  # and of what they usually take
_MEDIAN = 1.25  # the standard error of a median by that of a mean, of a normal distribution
_LEAST_SPREAD = 0.3  # of times that are all in one power of two


def median_s(place: Place) -> float:
    """What the time before this place usually is, in seconds: between the bounds of its power of two by rank."""
    half, seen = sum(place.gaps) / 2, 0
    for i, count in enumerate(place.gaps):
        if count and seen + count >= half:
            low, high = (0.0 if i == 0 else GAP_S * 2.0 ** (i - 1)), GAP_S * 2.0**i
            return low + (high - low) * (half - seen) / count
        seen += count
    return 0.0


def deviation(lines: Iterable[tuple[Line, int]]) -> float:
    """The standard deviation of the time at lines in a round, as a part of its mean, each with the rounds of its
    process; 0 for few. Without what comes of looking only so often: about a look's time for each look."""
    sums = [(n, line.seconds, line.squares) for line, n in lines]
    n, seconds, squares = (sum(each[i] for each in sums) for i in range(3))
    if n < _FEW or seconds <= 0:
        return 0.0
    mean = seconds / n
    return math.sqrt(max(0.0, squares / n - mean * mean - mean / RATE)) / mean


def correlation(place: Place) -> float:
    """Of the time before this place and the size of what it brings (Pearson); 0 where sizes are the same, or few."""
    if not place.sized or place.sized[0] < _FEW:
        return 0.0
    n, size, sizes, seconds, squares, products = place.sized
    spread = (n * sizes - size * size) * (n * squares - seconds * seconds)
    return (n * products - size * seconds) / math.sqrt(spread) if spread > 1e-12 else 0.0


def round_s(process: Process) -> float:
    """What a round of the process usually takes outside of the plane; 0 where it is not known."""
    main = process.main
    return median_s(main) if main is not None and sum(main.gaps) >= _ROUNDS else 0.0


@dataclass(frozen=True, slots=True)
class Odd:
    """Processes that take `ratio` times as long as those alike. `host`: all of one host do, in each of its roles.
    `lost`: the part of what the role could do that is lost by it."""

    processes: frozenset[tuple[str, int]]
    ratio: float
    host: bool
    lost: float


def odd(index: Index, role: str) -> Odd | None:
    """Which processes of a role differ from the others, if any do."""
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
    """Whether a process takes longer than those alike, by more than comes of rounds that differ: the difference of
    medians, by powers of two, beside its standard error."""
    ratio = taken[key] / _others(taken, key)
    if ratio < STRAGGLES:
        return False
    own = _spread(index.by_key[key].main)
    others = [_spread(index.by_key[other].main) for other in taken if other != key]
    error = _MEDIAN * math.sqrt(own[0] ** 2 / own[1] + max(spread**2 / rounds for spread, rounds in others))
    return math.log2(ratio) > SURE * error


def _spread(place: Place | None) -> tuple[float, int]:
    """The standard deviation of the power of two of the times before a place, and of how many."""
    counts = [] if place is None else place.gaps
    rounds = sum(counts)
    if not rounds:
        return _LEAST_SPREAD, 1
    mean = sum(i * count for i, count in enumerate(counts)) / rounds
    square = sum(count * (i - mean) ** 2 for i, count in enumerate(counts)) / rounds
    return max(_LEAST_SPREAD, math.sqrt(square)), rounds


def _in_step(index: Index, role: str) -> bool:
    """Whether the processes of a role go at one pace, since each waits for the slowest."""
    rounds = [process.rounds for process in index.by_role[role]]
    return min(rounds) > 0.6 * max(rounds)


def _others(taken: dict[tuple[str, int], float], key: tuple[str, int]) -> float:
    """What those take that are not this one: half of them take no longer."""
    return statistics.median_low(seconds for other, seconds in taken.items() if other != key)


def _is_host(index: Index, role: str, host: str, slow: set[tuple[str, int]]) -> bool:
    """Whether it is the host: its processes of this role are slow, more than one or in another role too."""
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
    """How the time of a vertex changes with the number of processes: `slope` of its seconds a step and process in
    log-log, -1 where it scales; `lost_s` are seconds a step more than if it did."""

    role: str
    file: str
    line: int
    slope: float
    lost_s: float


def scaling(small: Run, large: Run, steps: tuple[float, float]) -> dict[tuple[str, str, int], Scaling]:
    """By role, file and line: the vertices of both runs, of so many steps each, whose time does not scale from the
    processes of one to those of the other (Jin et al. 2020, section IV-A)."""
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
    """Seconds a step and process at each line, of own code and of calls."""
    found: dict[tuple[str, str, int], float] = {}
    for role, processes in index.by_role.items():
        for process in processes:
            taken = [(each.file, each.line, each.seconds) for each in process.lines]
            taken += [(each.file, each.line, each.seconds) for each in process.places]
            for file, line, seconds in taken:
                key = (role, file, line)
                found[key] = found.get(key, 0.0) + seconds / len(processes) / max(steps, 1.0)
    return found
