"""The settings given to `init()`, as plain values that every process of the job reads from the plane.

The first `init()` writes them; later calls adopt them, as in TransferQueue, and must not contradict them. A user's own
sampler is code, so only the processes that pass it to `init()` use it.

A configuration is a nested mapping, or one of OmegaConf. Unknown settings are refused, with the nearest known one.
The settings of TransferQueue's own backends are ignored: verl's configuration names all of them.

    transfer_queue.backend.storage_backend=Dataplane
    +transfer_queue.backend.Dataplane.memory=64GiB      # and so on; all of it is optional
"""

from __future__ import annotations

import difflib
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dataplane.client.sync import Plane
from dataplane.client.table_rows import TableSlice
from dataplane.config import TRANSPORTS, NodeConfig
from dataplane.errors import Misuse, NotReady
from dataplane.integrations import process
from dataplane.integrations.transfer_queue.errors import InvalidSetting

if TYPE_CHECKING:
    from transfer_queue import BaseSampler

NAME = "Dataplane"
"""The name of this package among TransferQueue's backends."""

OTHERS = ("SimpleStorage", "MooncakeStore", "Yuanrong", "RayStore")
"""TransferQueue's own backends."""

_SHOWN = 24  # names that an error lists

_SECTION = f"backend.{NAME}"
_NODES = (*(each.name for each in fields(NodeConfig)), "transports", "key")
_KNOWN: dict[str, Iterable[str]] = {
    "": ("enable", "metrics", "controller", "backend"),
    "metrics": ("enabled", "port", "endpoint"),
    "controller": ("sampler", "polling_mode", "zmq_info"),
    "backend": ("storage_backend", NAME, *OTHERS),
    _SECTION: ("dense", "job", *_NODES),
}
_ROW, _WHO, _TAG, _TOKEN, _METRICS = "settings", "first", "settings", "token", "metrics"
_WAIT_S = 10.0  # between a claim and the settings
_SAMPLERS = ("SequentialSampler", "RankAwareSampler", "GRPOGroupNSampler", "SeqlenBalancedSampler")
_ARGUMENTS = ("n_samples_per_prompt", "dp_size", "group_by")


JOB_VARIABLE = "DATAPLANE_JOB"
"""The environment variable with the name of the job."""

_UNNAMED, _RAY = "unnamed", "ray-"
_MOST = 128


@dataclass(frozen=True, slots=True)
class Job:
    """The job of a process: jobs that share a node have separate partitions, settings and indexes.

    A job is named by `init(job=...)`, by `$DATAPLANE_JOB`, or by Ray: all processes of a Ray job belong to one.
    `init()` puts the name into the environment, which children inherit. Without a name, the first `init()` creates a
    job for its own process and its children. `token`: a secret of the processes of an unnamed job; empty for a named
    one.

    Invariants: two jobs share keys only if both were given the same name. A process that cannot determine its job is
    refused: if it guessed, it could share the keys of another job, or share none with its own.
    """

    name: str
    token: str = ""

    def export(self) -> None:
        """Let the children of this process join it."""
        os.environ[JOB_VARIABLE] = f"{self.name}:{self.token}" if self.token else self.name


def named_job(name: object) -> Job:
    """The job with this name. Raises ValueError for an invalid name."""
    if not isinstance(name, str) or not 0 < len(name) <= _MOST or set("/:") & set(name):
        raise ValueError(f"a job's name is a text of 1 to {_MOST} characters without '/' and ':', not {name!r}")
    return Job(name)


def known_job() -> Job | None:
    """The job of this process, as far as the environment and Ray say."""
    said, found = os.environ.get(JOB_VARIABLE, ""), process.ray_job()
    by_ray = None if found is None else Job(f"{_RAY}{found[0].hex()[:12]}-{found[1].hex()}")
    if said and not (by_ray is not None and said.startswith(_RAY)):  # its Ray job may have ended
        name, _, token = said.partition(":")
        return Job(named_job(name).name, token)
    return by_ray


def new_job() -> Job:
    """An unnamed job."""
    return Job(_UNNAMED, secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class JobSettings:
    """sampler: the name of its class, one of `_SAMPLERS`. polling: whether `get_meta` returns without waiting. dense:
    whether tensors that were put dense are returned dense, rather than nested as by TransferQueue. nodes: the settings
    that `nodes` read."""

    sampler: str = "SequentialSampler"
    arguments: tuple[tuple[str, Any], ...] = ()
    polling: bool = False
    dense: bool = True
    nodes: dict[str, Any] = field(default_factory=dict)

    @property
    def grouped(self) -> bool:
        """Whether samplers use groups."""
        return self.sampler != "SequentialSampler"

    def made(self) -> BaseSampler:
        import transfer_queue

        made = getattr(transfer_queue, self.sampler)()
        for name, value in self.arguments:
            setattr(made, name, value)
        return made


def read(conf: Any, *, dense: bool) -> tuple[JobSettings, BaseSampler | None]:
    """The settings of a configuration, and the sampler object if it has one. Raises InvalidSetting."""
    import transfer_queue

    check(conf)
    given = at(conf, "controller.sampler")
    own = given() if isinstance(given, type) else given
    name = "SequentialSampler"
    arguments: tuple[tuple[str, Any], ...] = ()
    if isinstance(own, transfer_queue.BaseSampler):
        if type(own) in [getattr(transfer_queue, each) for each in _SAMPLERS]:
            name = type(own).__name__
            given = ((each, getattr(own, each)) for each in _ARGUMENTS if hasattr(own, each))
            arguments = tuple((each, int(value) if isinstance(value, np.integer) else value) for each, value in given)
    elif isinstance(own, str):
        name, own = own, None
        if name not in _SAMPLERS:
            near = difflib.get_close_matches(name, _SAMPLERS, 1, 0.5)
            meant = f"did you mean {near[0]}? " if near else ""
            raise InvalidSetting(
                f"there is no sampler {name!r}: {meant}name one of {', '.join(_SAMPLERS)}, or pass an object"
            )
    elif own is not None:
        raise InvalidSetting(f"a sampler is a BaseSampler, its class, or a name; not {type(own).__name__}")
    given = at(conf, f"{_SECTION}.dense")
    if not isinstance(given, bool | None):
        raise InvalidSetting(f"{_SECTION}.dense is true or false, not {given!r}")
    polling = bool(at(conf, "controller.polling_mode") or False)
    return JobSettings(name, arguments, polling, dense if given is None else given, _nodes(conf)), own


def _nodes(conf: Any) -> dict[str, Any]:
    """The settings of nodes to start, as plain values."""
    section = at(conf, _SECTION) or {}
    given = {name: section[name] for name in _NODES if section.get(name) is not None}
    if "transports" in given:
        named = given["transports"]
        if isinstance(named, str):
            named = named.replace(",", " ").split()
        if not isinstance(named, Sequence):
            raise InvalidSetting(f"{_SECTION}.transports is a list of names, not {named!r}")
        given["transports"] = list(map(str, named))
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


@dataclass(frozen=True, slots=True)
class Nodes:
    """The arguments of `integrations.ray.up`."""

    config: NodeConfig | None
    transports: tuple[str, ...]
    key: str | None


def metrics_port(conf: Any) -> int | None:
    """The port of the metrics, 0 for any; None if they are off. Raises InvalidSetting."""
    if not at(conf, "metrics.enabled"):
        return None
    given = at(conf, "metrics.port") or 0
    try:
        return int(given)
    except (TypeError, ValueError):
        raise InvalidSetting(f"metrics.port is a number, not {given!r}") from None


def nodes(given: Mapping[str, Any]) -> Nodes:
    """The nodes to start with these settings. Raises InvalidSetting."""
    rest = dict(given)
    transports, key = tuple(rest.pop("transports", ())), rest.pop("key", None)
    if set(transports) - set(TRANSPORTS) or len(set(transports)) < len(transports):
        raise InvalidSetting(f"{_SECTION}.transports are some of {', '.join(TRANSPORTS)}, each once, not {transports}")
    try:
        return Nodes(NodeConfig(**rest) if rest else None, transports, None if key is None else str(key))
    except (ValueError, TypeError) as error:
        raise InvalidSetting(f"{_SECTION}: {error}") from error


def job_name(conf: Any, given: str | None) -> Job | None:
    """The job that is named; None if there is no name. Raises InvalidSetting."""
    name = given if given is not None else at(conf, f"{_SECTION}.job")
    try:
        return None if name is None else named_job(name)
    except ValueError as error:
        raise InvalidSetting(str(error)) from None


def agree(plane: Plane, job: Job, own: JobSettings, first: Callable[[], object]) -> tuple[JobSettings, bool]:
    """The job's settings, and whether they are these: true if there were none; `first` is called before they are
    written. Raises Misuse if the plane has another unnamed job."""
    table = plane.table(_table(job))
    numbers, attempt = table.upsert([_ROW]).tolist(), 0
    while table.claim(f"{_WHO} {attempt}", numbers) is None:
        try:
            table.ready(["there"], timeout=_WAIT_S)  # the process with the claim writes them now
            return _of(table.look([_ROW]), job, plane), False
        except NotReady:  # it has died, or failed and deleted the row
            before, numbers = numbers, table.upsert([_ROW]).tolist()
            attempt = attempt + 1 if numbers == before else 0
    first()
    table.upsert([_ROW], {"there": [True]}, tags=[{_TAG: asdict(own), _TOKEN: job.token}])
    return own, True


def find(plane: Plane, job: Job) -> JobSettings | None:
    """The job's settings; None before the first `init()`. Raises as `agree`."""
    rows = plane.table(_table(job)).look(columns=["there"])
    return _of(rows, job, plane) if len(rows) and rows.have.all() else None


def forget(plane: Plane, job: Job) -> None:
    """Delete the settings: the next `init()` is the first."""
    plane.table(_table(job)).drop()


def tell_endpoint(plane: Plane, job: Job, endpoint: str) -> None:
    """Publish the address of the metrics to the job's processes."""
    plane.table(_table(job)).upsert([_ROW], tags=[{_METRICS: endpoint}])


def endpoint(plane: Plane, job: Job) -> str | None:
    """The address of the job's metrics, if they are served."""
    rows = plane.table(_table(job)).look()
    return rows.tags[0].get(_METRICS) if len(rows) else None


def compare(conf: Any, own: JobSettings, job: JobSettings) -> None:
    """Raises Misuse if a configuration contradicts the settings of the job."""
    said = {
        "controller.sampler": ((own.sampler, own.arguments), (job.sampler, job.arguments)),
        "controller.polling_mode": (own.polling, job.polling),
        f"{_SECTION}.dense": (own.dense, job.dense),
        **{f"{_SECTION}.{name}": (value, job.nodes.get(name)) for name, value in own.nodes.items()},
    }
    for path, (wanted, holds) in said.items():
        if at(conf, path) is not None and wanted != holds:
            raise Misuse(
                f"init() was called in this job before, with {path} = {_shown(holds)}, and now says {_shown(wanted)}:"
                " leave it out here, or say the same in all calls; close() in the first process ends the job, and"
                " init(job=...) names another"
            )


def _shown(value: Any) -> str:
    if not isinstance(value, tuple):
        return repr(value)
    return f"{value[0]}({', '.join(f'{name}={each!r}' for name, each in value[1])})"


def _table(job: Job) -> str:
    return f"transfer_queue.settings/{job.name}"


def _of(rows: TableSlice, job: Job, plane: Plane) -> JobSettings:
    given = rows.tags[0].get(_TAG)
    if not isinstance(given, dict) or given.get("sampler") not in _SAMPLERS:
        raise Misuse("the settings of this job are of another version: use one version of dataplane in all processes")
    if job.token and rows.tags[0].get(_TOKEN) != job.token:
        raise Misuse(
            f"the node at {plane.address} has a job already that was given no name, and this process is none of its"
            f" children: to take part in it, or to be a job beside it, name the job in all of its processes, with"
            f" init(job=...) or {JOB_VARIABLE} in their environment. If that job has ended, its rows are those of"
            f" init(job={job.name!r})"
        )
    arguments = tuple((str(name), value) for name, value in given["arguments"])
    nodes = dict(given.get("nodes") or {})
    return JobSettings(given["sampler"], arguments, bool(given["polling"]), bool(given["dense"]), nodes)


def merged(conf: Any, settings: JobSettings, job: Job, endpoint: str | None) -> Any:
    """The return value of `init`: the configuration with its defaults filled in, as one of OmegaConf."""
    from omegaconf import OmegaConf

    filled = {
        "controller": {"sampler": settings.sampler, "polling_mode": settings.polling, "zmq_info": None},
        "backend": {"storage_backend": NAME, NAME: {"dense": settings.dense, "job": job.name}},
        "metrics": {"enabled": endpoint is not None, "port": 0, "endpoint": None},
    }
    whole = OmegaConf.create(filled, flags={"allow_objects": True})
    whole = OmegaConf.merge(whole, conf if conf is not None else {})
    whole.backend.storage_backend, whole.metrics.endpoint = NAME, endpoint  # whatever was given
    return whole


def at(conf: Any, path: str) -> Any:
    """The value at a path, names with dots between; None if there is none."""
    for name in filter(None, path.split(".")):
        if conf is None or not hasattr(conf, "get"):
            return None
        conf = conf.get(name)
    return conf


def check(conf: Any) -> None:
    """Raises InvalidSetting for an unknown setting, and for a section that is not a mapping."""
    for path, known in _KNOWN.items():
        part = at(conf, path)
        if part is None:
            continue
        if not hasattr(part, "keys"):
            raise InvalidSetting(f"{path or 'a configuration'} is a mapping of settings, not {type(part).__name__}")
        for name in part.keys():  # noqa: SIM118  # OmegaConf's iterates over values where it is a list
            if name not in known:
                raise InvalidSetting(_unknown("setting", str(name), known, path))
    backend = at(conf, "backend.storage_backend")
    if backend is not None and backend not in (NAME, *OTHERS):
        raise InvalidSetting(_unknown("backend", str(backend), (NAME, *OTHERS)))


def names_this(conf: Any) -> bool:
    """Whether a configuration names this package as the backend. Raises InvalidSetting if it, or its section, has a
    name that is almost that."""
    section = at(conf, "backend")
    named = at(section, "storage_backend")
    for name in (named, *(section.keys() if hasattr(section, "keys") else ())):
        if name != NAME and difflib.get_close_matches(str(name), [NAME], 1, 0.7):
            raise InvalidSetting(_unknown("backend", str(name), (NAME,)))
    return bool(named == NAME)


def _unknown(what: str, name: str, known: Iterable[str], path: str = "") -> str:
    """An error with the nearest known name, or else all known ones."""
    listed = list(known)
    near = difflib.get_close_matches(name, listed, 1, 0.5)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    advice = f"there are {', '.join(listed[:_SHOWN])}{more}"
    if near:
        advice = f"did you mean {f'{path}.{near[0]}'.lstrip('.')}?"
    return f"there is no {what} {f'{path}.{name}'.lstrip('.')!r}: {advice}"
