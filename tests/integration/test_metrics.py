"""`/metrics` of real nodes, and a real Prometheus that scrapes them and answers every query of the dashboard."""

from __future__ import annotations

import json
import math
import re
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import dataplane as dp
from tests.integration.test_hosts import connected
from tests.optional import needs
from tests.processes import MIB, StandingNode, eventually, has_ipv6, pattern
from tests.tools import tool

DEPLOY = Path(__file__).parents[2] / "deploy"
ANY = "127.0.0.1:0"


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def scraped(plane: Any) -> dict[tuple[str, ...], float]:
    """The values of a plane's node, by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    text = read(f"http://{plane.stats().metrics}/metrics")
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, *(f"{name}={value}" for name, value in sorted(sample.labels.items())))
            assert key not in found, "no series is there twice"
            found[key] = sample.value
    return found


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Any]:
    with StandingNode(tmp_path, metrics=ANY) as node, dp.connect(node.address) as plane:
        yield plane


@needs("prometheus_client")
def test_operations_and_rows_are_counted(plane: Any) -> None:
    ref = plane.put({"x": pattern(1, MIB)})
    plane.get(ref)
    stream = plane.stream("rollouts", tasks=["reward", "actor"])
    stream.append({"x": [1, 2, 3]}, group="g")
    with stream.consume("actor", rows=2, columns=["x"]):
        pass
    with pytest.raises(ZeroDivisionError), stream.consume("reward", rows=3, columns=["x"]):
        raise ZeroDivisionError
    with stream.consume("reward", rows=3, columns=["x"]):
        pass
    found = scraped(plane)
    assert found["dataplane_put_bytes_total",] >= MIB
    assert found["dataplane_rows_appended_total",] == 3
    assert found["dataplane_rows_acked_total",] == 5
    assert found["dataplane_rows_redelivered_total",] == 3
    assert found["dataplane_task_lag_rows", "stream=rollouts", "task=actor"] == 1
    assert found["dataplane_task_redelivered_rows_total", "stream=rollouts", "task=reward"] == 3
    assert found["dataplane_stream_rows", "stream=rollouts"] == 1
    assert found["dataplane_stream_oldest_row_age_seconds", "stream=rollouts"] > 0
    for name in ("put", "get", "append", "consume_wait", "ack"):
        assert found[f"dataplane_{name}_seconds_count",] >= 1
        assert found[f"dataplane_{name}_seconds_sum",] > 0
        assert found[f"dataplane_{name}_seconds_bucket", "le=+Inf"] == found[f"dataplane_{name}_seconds_count",]
    stream.drop()
    after = scraped(plane)
    assert after["dataplane_rows_acked_total",] == 5
    assert not any("stream=rollouts" in key for key in after)


@needs("prometheus_client")
def test_hostile_names_neither_break_the_text_nor_grow_it(plane: Any) -> None:
    for name in ('a"b\n\\c{}', "\u2028 ☃", "(others)", "x" * 200, "x" * 200 + "y", " "):
        plane.stream(name, tasks=["t" * 150, '"']).append({"x": [1]})
    text = read(f"http://{plane.stats().metrics}/metrics")
    found = scraped(plane)
    assert found["dataplane_streams",] == 6
    assert sum(value for key, value in found.items() if key[0] == "dataplane_stream_rows") == 6
    assert max(map(len, text.splitlines())) < 400


@needs("prometheus_client")
def test_the_metrics_server_refuses_other_requests_and_garbage(plane: Any) -> None:
    host, port = plane.stats().metrics.split(":")
    import socket

    with socket.create_connection((host, int(port)), timeout=10) as raw:
        raw.sendall(b"\x00\xff garbage\r\n\r\n")
        raw.recv(1000)
    request = urllib.request.Request(f"http://{host}:{port}/metrics", method="POST", data=b"x")
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(request, timeout=10)
    assert scraped(plane)["dataplane_clients",] == 1


@needs("prometheus_client")
@pytest.mark.skipif(not has_ipv6(), reason="there is no IPv6 here")
def test_an_address_of_ipv6_is_shown_in_brackets(tmp_path: Path) -> None:
    with StandingNode(tmp_path, metrics="[::1]:0") as node, dp.connect(node.address) as plane:
        assert plane.stats().metrics.startswith("[::1]:")
        assert scraped(plane)


@pytest.mark.long
@needs("prometheus_client")
def test_the_node_command_serves_metrics_and_prints_their_address(tmp_path: Path) -> None:
    import sys

    command = [sys.executable, "-m", "dataplane.cli", "node", "--socket", tmp_path / "n.sock", "--memory", "8MiB"]
    command += ["--spill", "0", "--metrics", ANY]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            said = next(line for line in process.stderr if "metrics" in line)
            assert "dataplane_memory_budget_bytes" in read(said.split()[-1])
        finally:
            process.terminate()
            process.stderr.close()


class Prometheus:
    """A real one that scrapes these addresses, by the configuration of `deploy/`."""

    def __init__(self, directory: Path, targets: list[str]) -> None:
        program = tool("prometheus")
        config = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
        config = re.sub(r"targets: \[.*\]", f"targets: {json.dumps(targets)}", config).replace(": 5s", ": 1s")
        (directory / "prometheus.yml").write_text(config)
        for name in ("rules.yml", "alerts.yml"):
            text = (DEPLOY / "prometheus" / name).read_text()
            (directory / name).write_text(text.replace("interval: 5s", "interval: 1s"))
        files = [f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data"]
        self._log = (directory / "log").open("w")
        command = [program, *files, "--web.listen-address=127.0.0.1:0", "--log.level=warn"]
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        listening = eventually(self._listening, "Prometheus listens")
        self._url = f"http://127.0.0.1:{listening}"

    def _listening(self) -> int:
        assert self._process.poll() is None, Path(self._log.name).read_text()
        found = psutil.Process(self._process.pid).net_connections("tcp")
        return next((each.laddr.port for each in found if each.status == psutil.CONN_LISTEN), 0)

    def query(self, text: str) -> list[float]:
        """The values of a query now. Raises where Prometheus takes it for none."""
        answer = json.loads(read(f"{self._url}/api/v1/query?{urllib.parse.urlencode({'query': text})}"))
        assert answer["status"] == "success", answer
        return [float(each["value"][1]) for each in answer["data"]["result"]]

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


def queries() -> list[tuple[str, str]]:
    dashboard = json.loads((DEPLOY / "grafana" / "dashboards" / "dataplane.json").read_text())
    return [(panel["title"], each["expr"]) for panel in dashboard["panels"] for each in panel.get("targets", ())]


@needs("prometheus_client")
def test_every_dashboard_query_has_data_in_a_real_prometheus(tmp_path: Path) -> None:
    tool("prometheus")
    options: dict[str, Any] = {"metrics": ANY, "memory": "4MiB", "spill": "64MiB"}
    with connected(tmp_path, **options) as (_, (here, there)):
        stream = here.stream("rollouts", tasks=["actor", "reward"])
        targets = [plane.stats().metrics for plane in (here, there)]
        with Prometheus(tmp_path, targets) as prometheus:

            def work() -> None:
                refs = [here.put({"x": pattern(seed, MIB)}) for seed in range(8)]
                for seed, ref in enumerate(refs):  # some of them are on disk
                    assert np.array_equal(here.get(ref)["x"].numpy(), pattern(seed, MIB))
                assert np.array_equal(there.get(refs[7])["x"].numpy(), pattern(7, MIB))
                for ref in refs:
                    here.free(ref)
                stream.append({"x": [1, 2]})
                with stream.consume("actor", rows=2, columns=["x"], timeout=30):
                    pass

            left = queries()

            def answered() -> bool:
                work()
                left[:] = [each for each in left if not any(map(math.isfinite, prometheus.query(each[1])))]
                return not left

            eventually(answered, "every query has data")
            assert prometheus.query('sum(up{job="dataplane"})') == [2]
            assert prometheus.query("sum(dataplane_members)") == [4]
            assert sum(prometheus.query('dataplane_partitions{role="leader"}')) >= 1
            assert sum(prometheus.query("dataplane_spill_seconds_count")) >= 1
            assert sum(prometheus.query("dataplane_fetch_seconds_count")) >= 1
