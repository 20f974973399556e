"""Settings of nodes, and the environment variables of nodes and connections.

Settings are frozen, and validated when they are created.

Sizes are bytes, as `int` or as text such as `"2GiB"`. A size or `spill_dir` that is left `None` is derived from the
machine when the `NodeConfig` is created; its field then has the derived value.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys
import tempfile
import warnings
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Literal

from dataplane.errors import Rejected

PAGE = 4096
"""Bytes. Extents start and end at multiples of it, as O_DIRECT asks."""

_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate(("K", "M", "G", "T"), 1)
}
_MIB = 1 << 20

SPILL_REMEDY = "set spill_dir, --spill-dir or $DATAPLANE_SPILL_DIR to a directory that you can write to, or spill to 0"
"""What to do if the directory of spill files cannot be used."""

TRANSPORTS = ("tcp", "ucx", "nixl")
"""The data transports between hosts."""


def parse_size(size: int | str, name: str = "a size") -> int:
    """Bytes from an integer or from text: `"64MiB"`, `"1.5 GB"`. Raises ValueError for anything else, with the `name`
    of the setting."""
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise ValueError(f"{name} is bytes as an integer or text like '2GiB', not {size!r}")
    if isinstance(size, int):
        value = size
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"{name} is bytes, or a number and one of {', '.join(filter(None, _UNITS))}; not {size!r}")
        value = int(float(match[1]) * _UNITS[match[2]])
    if not 0 <= value < 1 << 63:
        raise ValueError(f"{name} is {'not negative' if value < 0 else 'less than 8388608 TiB'}: {size!r}")
    return value


def format_size(nbytes: float) -> str:
    """Bytes as text that people read: `"1.5 GiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The resources of one node, and when it spills.

    memory: bytes of shared memory. None: 30 % of the host's memory, or of the container's limit if that is less.
    spill: bytes on disk. 0 turns spilling off. None: four times `memory`, at most half of the free space there.
    spill_dir: the parent directory; in it, each node has a directory of its own for spill files. None:
        $DATAPLANE_SPILL_DIR, else /var/tmp.
    prewarm: bytes prefaulted in the background for the first client. None: 512 MiB, at most half of `memory`.
    high_watermark, low_watermark: shares of `memory`. Above the high one, shards are written to disk ahead of need
        until those without a copy there are below the low one.
    reservation_lease_s: seconds of silence after which a client's unsealed bytes are taken back.
    compression: "auto" compresses spill files with LZ4 when the disk is slower than LZ4; "never"; "always".
    data_dir: the directory of the node's identity and durable data, for this node only, on a persistent disk. A node
        that is restarted with it is the same member. None: nothing is durable, and each start is a new node.
    metrics: HOST:PORT where the node serves `/metrics` to Prometheus; port 0 is any. None: nowhere.
    """

    memory: int | str | None = None
    spill: int | str | None = None
    spill_dir: str | os.PathLike[str] | None = None
    prewarm: int | str | None = None
    high_watermark: float = 0.9
    low_watermark: float = 0.75
    reservation_lease_s: float = 60.0
    compression: Literal["auto", "never", "always"] = "auto"
    data_dir: str | os.PathLike[str] | None = None
    metrics: str | None = None

    def __post_init__(self) -> None:
        memory = parse_size(default_memory() if self.memory is None else self.memory, "memory") // PAGE * PAGE
        if memory < _MIB:
            raise ValueError(f"memory is at least 1 MiB, and {self.memory!r} is less: give a unit, as in '64MiB'")
        spill_dir = _directory("spill_dir", environment().spill_dir if self.spill_dir is None else self.spill_dir)
        spill = parse_size(_default_spill(memory, spill_dir) if self.spill is None else self.spill, "spill")
        if self.spill is None and not spill:
            _check_spill_dir(spill_dir)
            warnings.warn(f"no space is free in {spill_dir}, so nothing will be spilled", RuntimeWarning, stacklevel=3)
        prewarm = parse_size(min(512 * _MIB, memory // 2) if self.prewarm is None else self.prewarm, "prewarm")
        if prewarm > memory:
            raise ValueError(f"prewarm ({format_size(prewarm)}) is more than memory ({format_size(memory)})")
        for name in ("high_watermark", "low_watermark", "reservation_lease_s"):
            if not isinstance(getattr(self, name), Real):
                raise ValueError(f"{name} is a number, not {getattr(self, name)!r}")
        if not 0 < self.low_watermark <= self.high_watermark <= 1:
            raise ValueError(
                f"watermarks are 0 < low <= high <= 1, not low={self.low_watermark} high={self.high_watermark}"
            )
        if not self.reservation_lease_s > 0:
            raise ValueError(f"reservation_lease_s is more than 0, not {self.reservation_lease_s}")
        if self.compression not in ("auto", "never", "always"):
            raise ValueError(f"compression is 'auto', 'never' or 'always', not {self.compression!r}")
        if self.metrics is not None:
            _host_port(str(self.metrics))
        data_dir = None if self.data_dir is None else str(_directory("data_dir", self.data_dir))
        if data_dir is not None and Path(data_dir) == spill_dir:
            raise ValueError(f"data_dir and spill_dir are both {data_dir}: give each a directory of its own")
        derived = {"memory": memory, "spill": spill, "spill_dir": str(spill_dir), "prewarm": prewarm}
        for name, value in (derived | {"data_dir": data_dir}).items():
            object.__setattr__(self, name, value)

    @property
    def memory_bytes(self) -> int:
        """`memory`, in bytes."""
        return parse_size(self.memory or 0)

    @property
    def spill_bytes(self) -> int:
        """`spill`, in bytes."""
        return parse_size(self.spill or 0)

    @property
    def prewarm_bytes(self) -> int:
        """`prewarm`, in bytes, a whole number of pages."""
        return parse_size(self.prewarm or 0) // PAGE * PAGE

    @property
    def spill_path(self) -> Path:
        """`spill_dir`, as an absolute path."""
        return Path(self.spill_dir or "")

    @property
    def metrics_at(self) -> tuple[str, int] | None:
        """`metrics` as a host and a port, if it is set."""
        return None if self.metrics is None else _host_port(self.metrics)

    @property
    def data_path(self) -> Path | None:
        """`data_dir`, as an absolute path, if there is one."""
        return None if self.data_dir is None else Path(self.data_dir)


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """The membership of a node in a cluster.

    listen: the address of its control channel, `tcp://HOST:PORT`; port 0 is any. Its transports listen on the same
        HOST.
    join: an existing etcd, and the cluster's name: `etcd://HOST:PORT,.../NAME`.
    key: the cluster's key file. None is for a single host: without a key, nothing listens beyond loopback.
    advertise: the host, a name or an address, by which others reach it. Empty: the one that it listens on, which must
        not be a wildcard address then.
    transports: the data transports, of `TRANSPORTS`, the preferred one first. Empty: tcp, preceded by those with RDMA
        here.
    etcd_ca: the certificate file of the authority that signed the etcd's certificate; enables TLS.
    etcd_cert, etcd_cert_key: the files of this node's own certificate and its key, for an etcd that requires one.
    etcd_login: a file with one line, USER:PASSWORD, for an etcd that requires it.
    seeds: instead of `join`: the 1, 3 or 5 hosts whose nodes run an etcd for the cluster, `HOST[:PORT],...[/NAME]`, the
        same on every host. PORT is for clients of etcd, 2379 by default; its servers use the next one.
    seed_dir: the parent directory of a seed's etcd. None: the node's data directory if it has one, else
        $DATAPLANE_SPILL_DIR, else /var/tmp.
    """

    listen: str
    join: str = ""
    key: str | os.PathLike[str] | None = None
    advertise: str = ""
    transports: tuple[str, ...] = ()
    etcd_ca: str | os.PathLike[str] | None = None
    etcd_cert: str | os.PathLike[str] | None = None
    etcd_cert_key: str | os.PathLike[str] | None = None
    etcd_login: str | os.PathLike[str] | None = None
    seeds: str = ""
    seed_dir: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        host, _ = _host_port(self.listen.removeprefix("tcp://")) if self.listen.startswith("tcp://") else ("", 0)
        if not host:
            raise ValueError(f"a node listens at tcp://HOST:PORT, not at {self.listen!r}")
        if self.key is None and not _is_loopback(host):
            raise ValueError(f"{host} is not this host alone: a key is needed; `dataplane keygen FILE` makes one")
        if self.advertise:
            _check_host(self.advertise)
        elif host in _EVERY:
            raise ValueError(
                f"{host} is every address of this machine: say by which the others find it, with --advertise HOST"
            )
        unknown = [name for name in self.transports if name not in TRANSPORTS]
        if unknown or len(set(self.transports)) < len(self.transports):
            raise ValueError(f"transports are some of {', '.join(TRANSPORTS)}, each once, not {self.transports!r}")
        if self.seeds and (self.join or self.key is None):
            raise ValueError("--seeds goes with --key, by which the seeds know each other, and without --join")
        if self.seed_dir is not None and not self.seeds:
            raise ValueError("--seed-dir goes with --seeds")
        if not (self.join or self.seeds):
            raise ValueError(
                "a node that listens is one of a cluster: name the hosts whose nodes run its etcd, the same on every"
                " host, by --seeds HOST,..., or an etcd that is there by --join etcd://HOST:PORT/NAME"
            )
        files = (self.etcd_ca, self.etcd_cert, self.etcd_cert_key, self.etcd_login)
        if self.joined.engine != "etcd" and any(file is not None for file in files):
            raise ValueError("an authority, a certificate and a login of etcd go with a cluster that is joined by etcd")
        if self.etcd_ca is None and (self.etcd_cert is not None or self.etcd_login is not None):
            raise ValueError(
                "a certificate or a login go to an etcd over TLS alone: name the authority, --etcd-ca FILE"
            )

    @property
    def host(self) -> str:
        """The host that it listens on, without brackets; an empty one is every address."""
        host = _host_port(self.listen.removeprefix("tcp://"))[0]
        return "" if host == "*" else host

    @property
    def told(self) -> str:
        """The host in the addresses for others, in brackets if it is IPv6; empty: the one that it listens on."""
        host = self.advertise.removeprefix("[").removesuffix("]")
        return f"[{host}]" if ":" in host else host

    @property
    def joined(self) -> Join:
        """`join` or `seeds`, parsed."""
        return _seeds(self.seeds) if self.seeds else _join(self.join)


@dataclass(frozen=True, slots=True)
class Join:
    """The etcd by which nodes find each other: its HOST:PORT addresses, whose nodes run it if they are seeds, and the
    cluster's name there."""

    engine: Literal["etcd", "seeds"]
    addresses: tuple[str, ...]
    name: str


def _join(text: str) -> Join:
    engine, colon, where = text.partition("://")
    where, slash, name = where.partition("/")
    named = [each for each in where.split(",") if each]
    if not colon or engine != "etcd":
        raise ValueError(f"a cluster is joined by etcd://HOST:PORT,.../NAME, not by {text!r}")
    if not named:
        raise ValueError(f"{text!r} has no HOST:PORT of an etcd server")
    for address in named:
        check_host_port(address)
    _check_name(slash, name)
    return Join("etcd", tuple(named), name or "dataplane")


ETCD_PORT = 2379


def _seeds(text: str) -> Join:
    where, slash, name = text.partition("/")
    seeds = [each if _ports(each) else f"{each}:{ETCD_PORT}" for each in where.split(",")]
    for seed in seeds:
        check_host_port(seed)
        if int(seed.rpartition(":")[2]) > 65534:
            raise ValueError(f"{seed!r}: etcd servers also use the next port, and there is none after 65535")
    if len(set(seeds)) != len(seeds) or len(seeds) not in (1, 3, 5):
        raise ValueError(f"seeds are 1, 3 or 5 different hosts, so that a majority can be alive, not {where!r}")
    _check_name(slash, name)
    return Join("seeds", tuple(seeds), name or "dataplane")


def _ports(host: str) -> bool:
    """Whether the host ends in a port: for an IPv6 address only if it is in brackets."""
    return ":" in host.rpartition("]")[2] and not _is_v6(host)


def _check_name(slash: str, name: str) -> None:
    if slash and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name):
        raise ValueError(f"a cluster's name is 1 to 64 letters, digits and . _ -, not {name!r}")


def check_host_port(address: str) -> None:
    """Raises ValueError for an invalid HOST:PORT."""
    host, port = _host_port(address)
    if not port or set(host) & set("/*@ ") or host != host.strip():
        raise ValueError(f"{address!r} is no address that others can connect to: name a host in HOST:PORT")


_EVERY = ("*", "0.0.0.0", "::", "0")
"""Wildcard hosts: to listen on all addresses of a machine."""


def _check_host(host: str) -> None:
    bare = host.removeprefix("[").removesuffix("]")
    if bare in _EVERY or not bare or set(bare) & set("/*[], ") or bare != bare.strip() or (":" in bare) != _is_v6(bare):
        raise ValueError(f"{host!r} is no host that others could find this one by: give a name or an address, no port")


def _is_v6(host: str) -> bool:
    import ipaddress

    try:
        return ipaddress.ip_address(host.partition("%")[0]).version == 6
    except ValueError:
        return False


def _host_port(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is no HOST:PORT, as 127.0.0.1:9090 is")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_loopback(host: str) -> bool:
    import ipaddress  # not needed on one host

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment variables: the address to attach to (or None), the directories (of spill files, of sockets,
    and of this user's nodes' state), and whether events are recorded for traces and histograms."""

    address: str | None
    spill_dir: str
    runtime_dir: str
    state_dir: str
    observe: bool = True


def program() -> str:
    """The display name of this process: its program's name, and its name as a child of `multiprocessing`."""
    name = os.path.basename(sys.argv[0] if sys.argv and sys.argv[0] else "python")
    processes = sys.modules.get("multiprocessing.process")  # not imported, so this process is not its child
    child = "MainProcess" if processes is None else processes.current_process().name
    return name if child == "MainProcess" else f"{name} {child}"


def environment() -> Environment:
    """Read the environment: $DATAPLANE_ADDRESS, $DATAPLANE_SPILL_DIR, $DATAPLANE_OBSERVE, $XDG_RUNTIME_DIR, $TMPDIR,
    $XDG_STATE_HOME, $HOME."""
    temporary = tempfile.gettempdir()
    durable = "/var/tmp" if os.access("/var/tmp", os.W_OK) else temporary  # /tmp may be memory
    runtime = (os.environ.get("XDG_RUNTIME_DIR", ""), temporary, "/tmp")
    return Environment(
        address=os.environ.get("DATAPLANE_ADDRESS") or None,
        spill_dir=os.environ.get("DATAPLANE_SPILL_DIR") or durable,
        runtime_dir=next((each for each in runtime if _for_sockets(each)), temporary),
        state_dir=_state_dir(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"), durable),
        observe=os.environ.get("DATAPLANE_OBSERVE", "") != "0",
    )


def _state_dir(home: str, durable: str) -> str:
    """A directory of this user's own, in `home` if that can be had (XDG Base Directory Specification)."""
    there = next((each for each in (Path(home), *Path(home).parents) if each.is_dir()), None)
    if os.path.isabs(home) and there is not None and os.access(there, os.W_OK):
        return f"{home}/dataplane"
    return f"{durable}/dataplane-{os.getuid()}"


def _for_sockets(directory: str) -> bool:
    """Whether a node's socket can be in a directory in this one: a socket's path has at most 107 bytes (unix(7))."""
    return len(os.fsencode(directory)) <= 67 and os.access(directory, os.W_OK)


def default_memory() -> int:
    """30 % of the memory that this process may use, in bytes."""
    return int(0.3 * host_memory())


def host_memory() -> int:
    """The host's memory, or the control group's limit if that is less, in bytes."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([total, *_cgroup_limits(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))])


def check_host(config: NodeConfig) -> None:
    """Raises Rejected if this host has less memory than a node with these settings may use.

    For integrations that start nodes on hosts that a scheduler chose. A node that is started by hand logs a warning
    only: segments grow as writers need them, so a budget beyond the host's memory does no harm until it is used.
    """
    if beyond := beyond_host(config):
        raise Rejected(beyond)


def beyond_host(config: NodeConfig) -> str:
    """Advice if a node with these settings may use more memory than the host has; else empty."""
    there = host_memory()
    if config.memory_bytes <= there:
        return ""
    return (
        f"memory is {format_size(config.memory_bytes)}, and this host, or its container, has {format_size(there)}:"
        f" give at most that, or leave it out for {format_size(default_memory())}; more rows than fit go to disk"
        " (spill)"
    )


def _cgroup_limits(own: Path, root: Path) -> list[int]:
    """The memory limits, in bytes, of the control group that `own` names and of its ancestors (v1 and v2)."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            base, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be the host's, and the limit at the root of what is mounted.
        leaf = base / group.lstrip("/")
        for folder in (leaf, *leaf.parents):
            if not folder.is_relative_to(base):
                break
            try:
                limits.append(int((folder / name).read_text()))
            except (OSError, ValueError):
                continue  # not there, or "max"
    return limits


def _directory(name: str, path: object) -> Path:
    """The absolute path of a directory. Raises ValueError."""
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"{name} is the path of a directory, not {path!r}")
    return Path(path).expanduser().absolute()


def _check_spill_dir(directory: Path) -> None:
    """Raises Rejected, with advice, if this is no directory and none can be made. Leaves none behind."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    try:
        if missing:
            missing[-1].mkdir(0o700)
            missing[-1].rmdir()
        elif not directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    except OSError as error:
        raise Rejected(f"no directory can be made in {directory}: {error.strerror}; {SPILL_REMEDY}") from None


def _default_spill(memory: int, spill_dir: Path) -> int:
    existing = next(p for p in (spill_dir, *spill_dir.parents) if p.exists())
    return min(4 * memory, shutil.disk_usage(existing).free // 2)


def export_address(address: str | None) -> None:
    """Set the address in the environment, for this process's children and its other planes; None removes it."""
    if address is None:
        os.environ.pop("DATAPLANE_ADDRESS", None)
    else:
        os.environ["DATAPLANE_ADDRESS"] = address
