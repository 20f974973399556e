"""A node on each Ray node, with a real Ray of two nodes or more on this machine: found in every task, there again after
whatever dies, and gone with the job."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

import dataplane as dp
from dataplane.integrations import ray as door
from tests.integrations.marks import SYSTEMS, long
from tests.integrations.ray.conftest import NODE
from tests.processes import eventually, gone

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # what else is installed may have other `tests`

pytestmark = SYSTEMS

ROOT = Path(__file__).parents[3]
LOST_S = 40.0  # until Ray says that a Ray node has gone
SMALL = {"memory": "32MiB", "spill": 0, "prewarm": 0}


@pytest.fixture
def joined(driver: Any) -> Any:
    """A Ray job of two nodes: one job for as many tests as leave it as it is."""
    if not ray.is_initialized():
        ray.init(address=driver.address, log_to_driver=False)
    return driver


@pytest.fixture
def job(joined: Any) -> Any:
    """The same, without nodes."""
    door.down()
    return joined


@pytest.fixture
def two(joined: Any) -> Any:
    door.up(dp.NodeConfig(**SMALL))
    return joined


def places() -> list[str]:
    """The Ray nodes that are alive, this process's first."""
    here = ray.get_runtime_context().get_node_id()
    alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    return sorted(alive, key=lambda name: name != here)


def on(place: str, work: Callable[..., Any], *arguments: Any) -> Any:
    """What `work` returns, as a task on this Ray node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(place, soft=False))
    return ray.get(task(work).remote(*arguments), timeout=90)


def look() -> tuple[str, int, set[str]]:
    """The node that is found here: its address, its process, and whom it takes for members."""
    with dp.connect("ray") as plane:
        return plane.address, plane.stats().pid, set(plane.members()["members"])


def read(ref: dp.BatchRef) -> list[int]:
    with dp.connect("ray") as plane:
        return list(plane.get(ref)["x"].to_list())


def put(values: list[int]) -> dp.BatchRef:
    with dp.connect("ray") as plane:
        return plane.put({"x": values})


def refused() -> str:
    try:
        dp.connect("ray").close()
    except dp.PeerUnavailable as error:
        return str(error)
    return ""


def all_know_each_other(count: int) -> None:
    eventually(lambda: all(len(on(place, look)[2]) == count for place in places()), f"{count} members", LOST_S)


def test_each_ray_node_has_a_node_and_all_know_each_other(two: Any) -> None:
    found = [on(place, look) for place in places()]
    assert len({address for address, _, _ in found}) == len({pid for _, pid, _ in found}) == 2
    address, pid, _ = look()
    assert address == found[0][0], "the driver has that of its own Ray node"
    all_know_each_other(2)
    (cluster,) = [argument for argument in psutil.Process(pid).cmdline() if "listen" in argument]
    assert "/dev/fd/" in cluster, "the key is on no command line"
    assert f"tcp://{ray.nodes()[0]['NodeManagerAddress']}:0" in cluster


def test_the_status_command_lists_nodes_of_a_ray_job(two: Any) -> None:
    addresses = [on(place, look)[0] for place in places()]
    shell = [sys.executable, "-m", "dataplane.cli", "status"]
    said = subprocess.run(shell, capture_output=True, text=True, timeout=60).stderr
    assert all(address in said for address in addresses), said
    one = json.loads(subprocess.run([*shell, addresses[0], "--json"], capture_output=True, timeout=60).stdout)
    assert one["address"] == addresses[0]


def test_references_pass_through_ray(two: Any) -> None:
    here, there = places()
    all_know_each_other(2)
    assert on(here, read, on(there, put, [1, 2, 3])) == [1, 2, 3]
    with dp.connect("ray") as plane:
        ref = plane.put({"x": [4, 5]})
        assert on(there, read, ref) == [4, 5]
        assert on(there, read, ray.put(ref)) == [4, 5]


def test_an_asynchronous_actor_reads_references(two: Any) -> None:
    class Reader:
        async def __init__(self) -> None:
            self.plane = None

        async def read(self, ref: dp.BatchRef) -> list[int]:
            async with dp.aio.connect("ray") as plane:
                return list((await plane.get(ref))["x"].to_list())

    reader = ray.remote(num_cpus=0)(Reader).remote()
    assert ray.get(reader.read.remote(put([7])), timeout=60) == [7]


def test_node_statistics_are_exported_as_ray_metrics(two: Any) -> None:
    import re
    import urllib.request

    with dp.connect("ray") as plane:
        node = plane.stats().node
        plane.put({"x": [1, 2, 3]})
        ports = [each["MetricsExportPort"] for each in ray.nodes() if each["Alive"]]

        def exported() -> bool:
            text = "".join(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode() for port in ports)
            puts = [line for line in text.splitlines() if re.match(r"ray_dataplane_put_bytes_total\{", line)]
            counts = [line for line in text.splitlines() if re.match(r"ray_dataplane_put_seconds_bucket", line)]
            return any(node in line and float(line.split()[-1]) > 0 for line in puts) and bool(counts)

        eventually(exported, "Ray exports the node's figures", timeout_s=90)


def test_a_killed_node_process_is_restarted(two: Any) -> None:
    here, there = places()
    all_know_each_other(2)
    old, pid, _ = on(there, look)
    ref = on(there, put, [1])
    psutil.Process(pid).kill()
    eventually(lambda: gone(pid), "it was killed")
    new, again, _ = on(there, look)
    assert (new, again) != (old, pid)
    all_know_each_other(2)
    with pytest.raises(dp.OwnerDied), dp.connect("ray") as plane:
        plane.get(ref)
    assert on(here, read, on(there, put, [2])) == [2]
    assert not Path(old.removeprefix("unix://")).exists(), "the next that starts there tidies up"


@pytest.mark.parametrize("whose", ["_DataplaneHost", *long("_DataplaneManager")])
def test_a_killed_node_actor_or_manager_is_restarted(two: Any, whose: str) -> None:
    before = {on(place, look)[1] for place in places()}
    ours = psutil.Process().children(recursive=True)  # other jobs on this machine have such actors too
    actors = [process for process in ours if f"ray::{whose}" in "".join(_command(process))]
    assert len(actors) == (1 if whose == "_DataplaneManager" else 2)
    actors[0].kill()
    left = 0 if whose == "_DataplaneManager" else 1
    eventually(lambda: sum(not gone(pid) for pid in before) == left, "what it had has ended", LOST_S)
    all_know_each_other(2)
    assert len({on(place, look)[1] for place in places()} & before) == left


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_nodes_follow_added_and_removed_ray_nodes(two: Any) -> None:
    _, there = places()
    third = two.add_node(**NODE)
    all_know_each_other(3)
    last = next(place for place in places() if place == third.node_id)
    _, pid, _ = on(last, look)
    assert read(on(last, put, [3])) == [3]
    ref = on(last, put, [3])
    two.remove_node(third, allow_graceful=False)
    eventually(lambda: gone(pid), "its node ends with it")
    eventually(lambda: len(look()[2]) == 2, "the others know it")
    with pytest.raises(dp.OwnerDied), dp.connect("ray") as plane:
        plane.get(ref)
    assert on(there, read, put([4])) == [4]
    eventually(
        lambda: third.node_id not in places(), "Ray, which may be later, knows it too: it sends it no task", LOST_S
    )


def etcd_directory(pids: list[int]) -> Path:
    """Where the etcd is kept that one of these nodes runs."""
    commands = [child.cmdline() for pid in pids for child in psutil.Process(pid).children()]
    [data] = [each.removeprefix("--data-dir=") for command in commands for each in command if "--data-dir=" in each]
    return Path(data).parents[1]


@pytest.mark.long
def test_nodes_are_stopped_and_started_with_other_settings(two: Any, tmp_path: Path) -> None:
    from dataplane.client.embedded import new_key

    pids = [on(place, look)[1] for place in places()]
    door.up(timeout=10)  # which it is
    assert look()[1] == pids[0]
    etcd = etcd_directory(pids)
    assert etcd.exists()
    door.down()
    eventually(lambda: all(gone(pid) for pid in pids), "they ended")
    eventually(lambda: not etcd.exists(), "its etcd leaves nothing")
    assert "up()" in eventually(lambda: on(places()[1], refused), "it is refused")
    door.down()
    with pytest.raises(dp.Misuse, match="dataplane keygen"):
        door.up(dp.NodeConfig(**SMALL), key=tmp_path / "none")
    with pytest.raises(dp.Rejected, match="nowhere"):
        door.up(dp.NodeConfig(**SMALL | {"spill": "1MiB", "spill_dir": "/proc/nowhere"}))
    with pytest.raises(dp.Rejected, match="nowhere"):
        dp.connect("ray")
    door.down()
    (tmp_path / "key").write_bytes(new_key())
    door.up(dp.NodeConfig(**SMALL), transports=["tcp"], key=tmp_path / "key")
    assert on(places()[1], look)[1] not in pids
    all_know_each_other(2)
    (cluster,) = [argument for argument in psutil.Process(look()[1]).cmdline() if "listen" in argument]
    assert '"transports": ["tcp"]' in cluster


class Trainer:
    def up(self) -> int:
        door.up(dp.NodeConfig(**SMALL))
        return look()[1]


@pytest.mark.long
def test_nodes_started_by_an_actor_end_with_it(job: Any) -> None:
    trainer = ray.remote(num_cpus=0)(Trainer).remote()
    pids = {ray.get(trainer.up.remote(), timeout=90)}
    pids |= {on(place, look)[1] for place in places()}
    assert len(pids) == 2
    ray.kill(trainer)
    eventually(lambda: all(gone(pid) for pid in pids), "they end", LOST_S)


DRIVER = """
    import os, signal, sys, ray
    import dataplane as dp
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    ray.init(address=sys.argv[1], log_to_driver=False)
    settings = dp.NodeConfig(memory="32MiB", spill=0, prewarm=0)

    @ray.remote(num_cpus=0)
    def look():
        with dp.connect("ray") as plane:
            return plane.stats().pid, plane.address

    with dp.connect("ray", config=settings) as plane:
        assert plane.stats().memory_budget == 32 << 20
    for node in ray.nodes():
        if node["Alive"]:
            on = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            print(*ray.get(look.options(scheduling_strategy=on).remote()), flush=True)
    print("done", flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "shutdown":
        ray.shutdown()
"""


@pytest.mark.parametrize("how", [*long("shutdown", "exit"), "killed"])
def test_a_job_has_separate_nodes_and_leaves_nothing(two: Any, how: str) -> None:
    mine = {on(place, look)[1] for place in places()}
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), two.address, how]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == (-signal.SIGKILL if how == "killed" else 0), done.stderr
    *lines, last = done.stdout.split("\n")[:-1]
    assert last == "done"
    theirs = dict(line.split() for line in lines)
    assert len(theirs) == 2
    assert not mine & set(map(int, theirs))
    for pid, address in theirs.items():
        eventually(lambda pid=pid: gone(int(pid)), "its process ends", LOST_S)
        path = Path(address.removeprefix("unix://"))
        eventually(lambda path=path: not path.parent.exists(), "its files go")
    assert {on(place, look)[1] for place in places()} == mine, "the end of one is not that of the other"


def test_a_data_directory_whose_etcd_ran_on_an_absent_host_is_refused(job: Any, tmp_path: Path) -> None:
    from dataplane.client.embedded import new_key

    (tmp_path / "key").write_bytes(new_key())
    seed = tmp_path / "data" / "dataplane-seed-7"
    seed.mkdir(parents=True)
    (seed / "seeds.json").write_text(json.dumps({"seeds": ["192.0.2.1:12000"]}))
    with pytest.raises(dp.Rejected, match=r"192\.0\.2\.1, where no Ray node is"):
        door.up(dp.NodeConfig(**SMALL, data_dir=str(tmp_path / "data")), key=tmp_path / "key")


def test_ray_calls_without_ray_are_misuse(cluster: Any) -> None:
    ray.shutdown()
    for use in (lambda: dp.connect("ray"), door.up, door.down):
        with pytest.raises(dp.Misuse, match=r"ray\.init"):
            use()


DURABLE = """
    import sys, ray
    import dataplane as dp
    from dataplane.integrations import ray as nodes
    ray.init("local", num_cpus=1, object_store_memory=80 << 20, include_dashboard=False, log_to_driver=False)
    config = dp.NodeConfig(memory="32MiB", spill=0, prewarm=0, data_dir=sys.argv[1])
    try:
        nodes.up(config)
    except dp.Misuse as error:
        print(error)
    nodes.up(config, key=sys.argv[2])
    with dp.connect("ray") as plane:
        stream = plane.stream("rows", tasks=["actor"], durable=True)
        stream.append({"x": [1, 2, 3]})
        rows = 3 * int(sys.argv[3])
        with stream.consume("actor", rows=rows, min_rows=rows, columns=["x"], timeout=60) as delivery:
            print(delivery.get()["x"].to_list(), flush=True)
            delivery.nack()
"""


@pytest.mark.long
def test_durable_streams_are_recovered_by_the_next_job(tmp_path: Path) -> None:
    from dataplane.client.embedded import new_key

    (tmp_path / "key").write_bytes(new_key())
    for job in (1, 2):
        command = [sys.executable, "-c", textwrap.dedent(DURABLE), tmp_path / "data", tmp_path / "key", str(job)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        refused, found = done.stdout.splitlines()
        assert "dataplane keygen" in refused
        assert found == str([1, 2, 3] * job)
