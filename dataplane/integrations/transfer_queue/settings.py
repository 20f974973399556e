"""What `init()` is told, as plain values that every process of the job reads from the plane.

The first `init()` writes them; later ones take them over, as TransferQueue's do. A sampler of the user's own is code:
it is used in the processes that are given it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dataplane.client.sync import Plane
from dataplane.client.tables import Rows
from dataplane.config import NodeConfig
from dataplane.errors import Misuse
from dataplane.integrations.transfer_queue import samplers

TABLE = "transfer_queue.settings"

_ROW, _WHO, _TAG = "settings", "first", "settings"
_WAIT_S = 30.0
_SAMPLERS: dict[str, type[samplers.BaseSampler]] = {
    each.__name__: each
    for each in (
        samplers.SequentialSampler,
        samplers.RankAwareSampler,
        samplers.GRPOGroupNSampler,
        samplers.SeqlenBalancedSampler,
    )
}
_ARGUMENTS = ("n_samples_per_prompt", "dp_size", "group_by")


@dataclass(frozen=True, slots=True)
class Settings:
    """sampler: its class's name, one of those here. polling: `get_meta` never waits. dense: what was put dense comes
    back dense; false: nested, as TransferQueue's does."""

    sampler: str = "SequentialSampler"
    arguments: tuple[tuple[str, Any], ...] = ()
    polling: bool = False
    dense: bool = True

    @property
    def grouped(self) -> bool:
        """Whether samplers look for groups."""
        return self.sampler != "SequentialSampler"

    def made(self) -> samplers.BaseSampler:
        """A new one of the samplers."""
        return _SAMPLERS[self.sampler](**dict(self.arguments))


def read(conf: Any, *, dense: bool) -> tuple[Settings, samplers.BaseSampler | None]:
    """What a configuration says, and the sampler object that it has, if it has one. Raises ValueError."""
    given = _at(conf, "controller", "sampler")
    own = given() if isinstance(given, type) else given
    name = "SequentialSampler"
    arguments: tuple[tuple[str, Any], ...] = ()
    if isinstance(own, samplers.BaseSampler):
        name = type(own).__name__ if _SAMPLERS.get(type(own).__name__) is type(own) else "SequentialSampler"
        arguments = tuple((each, getattr(own, each)) for each in _ARGUMENTS if hasattr(own, each))
        arguments = arguments if type(own) in _SAMPLERS.values() else ()
    elif isinstance(own, str):
        name, own = own, None
        if name not in _SAMPLERS:
            raise ValueError(f"there is no sampler {name!r}: name one of {', '.join(_SAMPLERS)}, or pass an object")
    elif own is not None:
        raise ValueError(f"a sampler is a BaseSampler, its class, or a name; not {type(own).__name__}")
    told = _at(conf, "backend", "Dataplane", "dense")
    polling = bool(_at(conf, "controller", "polling_mode") or False)
    return Settings(name, arguments, polling, dense if told is None else bool(told)), own


def node_config(conf: Any) -> NodeConfig | None:
    """The settings of a node that is started: `backend.Dataplane.node`, the arguments of `dataplane.NodeConfig`."""
    told = _at(conf, "backend", "Dataplane", "node")
    return None if told is None else NodeConfig(**{str(name): told[name] for name in told})


def agree(plane: Plane, own: Settings) -> tuple[Settings, bool]:
    """The job's settings: these where nobody has written any, which is the second value."""
    table = plane.table(TABLE)
    numbers = table.write([_ROW])
    if table.take(_WHO, numbers) is not None:
        table.write([_ROW], {"there": [True]}, tags=[{_TAG: asdict(own)}])
        return own, True
    table.ready(["there"], timeout=_WAIT_S)  # who was first writes them now
    return _of(table.look([_ROW])), False


def find(plane: Plane) -> Settings | None:
    """The job's settings; None where nobody has called `init()`."""
    rows = plane.table(TABLE).look(columns=["there"])
    return _of(rows) if len(rows) and rows.have.all() else None


def forget(plane: Plane) -> None:
    """The next `init()` is the first."""
    plane.table(TABLE).drop()


def _of(rows: Rows) -> Settings:
    told = rows.tags[0].get(_TAG)
    if not isinstance(told, dict) or told.get("sampler") not in _SAMPLERS:
        raise Misuse("the settings of this job are of another version: use one version of dataplane in all processes")
    arguments = tuple((str(name), value) for name, value in told["arguments"])
    return Settings(told["sampler"], arguments, bool(told["polling"]), bool(told["dense"]))


def _at(conf: Any, *path: str) -> Any:
    """What a configuration has there; None where it has nothing. A dict or an OmegaConf one."""
    for name in path:
        if conf is None or not hasattr(conf, "get"):
            return None
        conf = conf.get(name)
    return conf


def merged(conf: Any, settings: Settings) -> Any:
    """What `init` gives back: the configuration with what was left out, as an OmegaConf one where that is installed."""
    given = conf if conf is not None else {}
    filled = {
        "controller": {"sampler": settings.sampler, "polling_mode": settings.polling, "zmq_info": None},
        "backend": {"storage_backend": "Dataplane", "Dataplane": {"dense": settings.dense}},
        "metrics": {"enabled": False, "endpoint": None},
    }
    try:
        from omegaconf import OmegaConf
    except ImportError:
        return filled | dict(given)
    whole = OmegaConf.create(filled, flags={"allow_objects": True})
    return OmegaConf.merge(whole, given)
