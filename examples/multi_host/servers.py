"""The etcd servers that the nodes start, and their leader."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.namespaces import Host, enter
from dataplane.cluster.certificates import certificates
from dataplane.wire import auth
from examples.multimodal_grpo.killed import descendants

_URLS = "--listen-client-urls="
_WAIT_S = 60.0
_ASK_S = 5.0


class Servers:
    """The servers of some hosts, by the hosts' numbers."""

    def __init__(self, hosts: Mapping[int, Host], key: Path, count: int) -> None:
        """Wait until `count` servers know a leader. Raises TimeoutError."""
        self._hosts = hosts
        self._tls = certificates(auth.load(key), []).client()
        deadline = time.monotonic() + _WAIT_S
        while len(self._states()) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"there are not {count} etcd servers after {_WAIT_S:.0f} s")
            time.sleep(0.1)

    def leader(self) -> int:
        """The host whose server leads. Raises TimeoutError if none does."""
        deadline = time.monotonic() + _WAIT_S
        while time.monotonic() < deadline:
            for host, state in self._states().items():
                if state["leader"] == state["header"]["member_id"]:
                    return host
            time.sleep(0.1)
        raise TimeoutError("no etcd server leads")

    def hand_over(self) -> int:
        """Transfer the leadership to another server. Returns its host."""
        before = self.leader()
        states = self._states()
        target = next(state["header"]["member_id"] for host, state in states.items() if host != before)
        self._ask(before, "maintenance/transfer-leadership", {"targetID": target})
        return next(host for host, state in states.items() if state["header"]["member_id"] == target)

    def _states(self) -> dict[int, Any]:
        """The status of each server that knows a leader, by host."""
        found = {host: self._ask(host, "maintenance/status", {}) for host in self._hosts}
        return {host: said for host, said in found.items() if said is not None and said.get("leader", "0") != "0"}

    def _ask(self, host: int, path: str, question: Mapping[str, Any]) -> Any:
        """The answer of the host's server to a request; None if it gives none."""
        answers: list[Any] = []

        def ask(url: str) -> None:
            enter(self._hosts[host].name)  # only this thread enters
            request = urllib.request.Request(f"{url}/v3/{path}", json.dumps(question).encode())
            try:
                with urllib.request.urlopen(request, timeout=_ASK_S, context=self._tls) as answer:
                    answers.append(json.load(answer))
            except OSError:
                pass

        for url in self._urls(host):
            thread = threading.Thread(target=ask, args=(url,))
            thread.start()
            thread.join()
        return answers[0] if answers else None

    def _urls(self, host: int) -> list[str]:
        found = []
        for pid in descendants(self._hosts[host].process.pid):
            try:
                said = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            except OSError:  # it has just ended
                continue
            found += [each.removeprefix(_URLS) for each in said if each.startswith(_URLS)]
        return found
