"""Whose the other end of a TCP connection within this host is: the kernel knows the user of every socket.

It is asked for the one socket (`sock_diag(7)`), which takes some 20 microseconds however many there are. Where that is
not to be had, as in some containers, the table of all is read (`/proc/net/tcp`, `proc(5)`): 5 ms on a host with 2,000.

What always holds: a user is told of a socket that a process has, alone; of one whose process has closed it, or has not
accepted it yet, nobody is.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from contextlib import suppress
from pathlib import Path

Address = tuple[str, int]

_TABLES = Path("/proc/net")
_NETLINK_SOCK_DIAG, _BY_FAMILY, _REQUEST = 4, 20, 1  # linux/netlink.h, linux/sock_diag.h
_ALL_STATES = 0xFFFFFFFF
_HEAD = struct.Struct("=IHHII")  # struct nlmsghdr
_ASKED = struct.Struct("=BBBxI")  # struct inet_diag_req_v2, up to its id
_TOLD = struct.Struct("=4x48x12xII")  # struct inet_diag_msg: of it the user, and the inode


def owner(connected: socket.socket) -> int | None:
    """The user of the process at the other end of a TCP connection within this host; None where no process has it.
    Raises OSError where the connection has ended."""
    ours, theirs = _plain(connected.getsockname()), _plain(connected.getpeername())
    found = _diagnosed(theirs, ours)
    if found is None and _diagnosed(ours, theirs) is None:  # not even this end is known
        found = _listed(theirs, ours, _TABLES)
    return found


def _plain(address: tuple[str, ...]) -> Address:
    """An address, as one of IPv4 where it stands for one."""
    host = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return str(mapped or host), int(address[1])


def _diagnosed(local: Address, remote: Address) -> int | None:
    """The user of the socket between these, as its owner sees them."""
    hosts = [ipaddress.ip_address(host).packed for host, _ in (local, remote)]
    family = socket.AF_INET if len(hosts[0]) == 4 else socket.AF_INET6
    ports = struct.pack("!HH", local[1], remote[1])
    identity = ports + b"".join(each.ljust(16, b"\0") for each in hosts) + struct.pack("=I", 0) + b"\xff" * 8
    asked = _ASKED.pack(family, socket.IPPROTO_TCP, 0, _ALL_STATES) + identity
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as kernel:
            kernel.settimeout(1.0)
            kernel.send(_HEAD.pack(_HEAD.size + len(asked), _BY_FAMILY, _REQUEST, 1, 0) + asked)
            told = kernel.recv(4096)
    except OSError:
        return None
    _, kind, _, _, _ = _HEAD.unpack_from(told)
    if kind != _BY_FAMILY or len(told) < _HEAD.size + _TOLD.size:
        return None
    uid, inode = _TOLD.unpack_from(told, _HEAD.size)
    return int(uid) if inode else None


def _listed(local: Address, remote: Address, tables: Path) -> int | None:
    """As `_diagnosed`, from the tables of all sockets."""
    for name, v6 in (("tcp", False), ("tcp6", True)):
        here, there = _key(local, v6), _key(remote, v6)
        with suppress(OSError), (tables / name).open() as table:
            for line in table:
                if here in line and there in line:
                    fields = line.split()
                    if fields[1:3] == [here, there] and fields[9] != "0":
                        return int(fields[7])
    return None


def _key(address: Address, v6: bool) -> str:
    """An address as it is in such a table: words of four bytes, each as a number of this machine."""
    packed = ipaddress.ip_address(address[0]).packed
    if v6 and len(packed) == 4:
        packed = b"\0" * 10 + b"\xff\xff" + packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{address[1]:04X}"
