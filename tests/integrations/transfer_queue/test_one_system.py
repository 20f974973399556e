"""One system a job: whatever the workers of a Ray job import, they reach its plane, or are told why not."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integrations.marks import long
from tests.integrations.nursery import Nursery, Process

pytestmark = [pytest.mark.timeout(180)]

RAY = """
import time
import dataplane.integrations.transfer_queue as ours
def start_ray():
    import ray
    ray.init(os.environ["RAY"], log_to_driver=False)
    deadline = time.monotonic() + 30
    while ray.util.list_named_actors(all_namespaces=True):
        assert time.monotonic() < deadline, "the job before has ended"
        time.sleep(0.01)
    return ray
SMALL = {"backend": {"Dataplane": {"memory": "64MiB", "spill": 0, "prewarm": 0}}}
"""


@pytest.fixture
def driver(nursery: Nursery, cluster: str) -> Callable[[str], Process]:
    """Starts a process that runs a program, without a job or a node in its environment; `start_ray` makes it the driver
    of a job."""
    nothing = dict.fromkeys(("DATAPLANE_ADDRESS", "DATAPLANE_JOB", "DATAPLANE_TRANSFER_QUEUE"), "")
    return lambda code: nursery.process(RAY + textwrap.dedent(code), RAY=cluster, **nothing)


def test_workers_that_import_transfer_queue_use_the_plane_of_the_job(driver: Callable[[str], Process]) -> None:
    """Of a job that knows nothing of verl, whose workers are in `verl/test_fit.py`; and find, as recipes do, the
    controller and its configuration."""
    code = """
        from importlib import resources
        from omegaconf import OmegaConf
        ours.install()
        ray = start_ray()
        base = OmegaConf.load(resources.files("transfer_queue") / "config.yaml")
        tq.init(OmegaConf.merge(base, {"controller": {"polling_mode": True}, **SMALL}))
        tq.kv_put("a", "train", tag={"from": "driver"})

        @ray.remote
        def work():
            import transfer_queue
            from transfer_queue.utils.logging_utils import get_logger
            get_logger("worker")
            transfer_queue.init()
            transfer_queue.kv_put("b", "train", tag={"from": "worker"})
            seen = transfer_queue.kv_list()
            controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
            config = ray.get(controller.get_config.remote())
            names = ray.get(controller.list_partitions.remote())
            held = ray.get(controller.get_partition_snapshot.remote("train"))
            tags = {key: held.custom_meta[index]["from"] for key, index in held.keys_mapping.items()}
            ray.get(controller.clear_partition.remote("train"))
            gone = ray.get(controller.get_partition_snapshot.remote("train"))
            found = config.controller.polling_mode, config.backend.storage_backend, names, tags, gone
            return transfer_queue.kv_put.__module__, seen, found

        tell([*ray.get(work.remote()), tq.kv_list()])
    """
    with driver(code) as process:
        name, seen, found, left = process.hear()
    assert name == "dataplane.integrations.transfer_queue.kv"
    assert seen == {"train": {"a": {"from": "driver"}, "b": {"from": "worker"}}}
    assert found == [True, "Dataplane", ["train"], {"a": "driver", "b": "worker"}, None]
    assert left == {}


@pytest.mark.parametrize("installed", [False, *long(True)], ids=["configured", "installed"])
def test_workers_of_a_ray_started_before_join_the_job_at_their_first_call(
    driver: Callable[[str], Process], *, installed: bool
) -> None:
    """They have TransferQueue itself, which finds the job's controller: by `init()`, or by any other call."""
    code = f"""
        ray = start_ray()
        if {installed}:
            ours.install()
            tq.init(SMALL)
        else:
            import dataplane.integrations.verl.plugin
            import transfer_queue
            transfer_queue.init({{"backend": {{"storage_backend": "Dataplane", **SMALL["backend"]}}}})
        tq.kv_put("a", "train", {{"x": torch.ones(2)}}, {{"by": "driver"}})

        @ray.remote
        def work(call, *arguments, **named):
            import asyncio, inspect
            import transfer_queue
            first = getattr(transfer_queue, call)(*arguments, **named)
            if inspect.iscoroutine(first):
                asyncio.run(first)
            seen = transfer_queue.kv_list()
            transfer_queue.close()
            return seen, transfer_queue.kv_list.__module__

        row = {{"x": torch.zeros(3)}}
        batch = TensorDict({{"x": torch.ones(1, 3)}}, batch_size=[1])
        tell([ray.get(work.remote(*each)) for each in [
            ("init",),
            ("kv_list",),
            ("kv_batch_get", "a", "train"),
            ("kv_put", "b", "train", row, {{"by": "kv_put"}}),
            ("kv_batch_put", ["c"], "train", batch, [{{"by": "kv_batch_put"}}]),
            ("async_kv_put", "d", "train", row, {{"by": "async_kv_put"}}),
            ("async_kv_batch_put", ["e"], "train", batch, [{{"by": "async_kv_batch_put"}}]),
        ]])
        tell([tq.kv_list(), sorted(map(len, tq.kv_batch_get(list("abcde"), "train")["x"].unbind()))])
        tq.close()
        tell("done")
    """
    with driver(code) as process:
        for seen, module in process.hear():
            assert seen["train"]["a"] == {"by": "driver"}
            assert module == "transfer_queue.interface", "until its next call"
        tags, lengths = process.hear()
        by = ["driver", "kv_put", "kv_batch_put", "async_kv_put", "async_kv_batch_put"]
        assert tags == {"train": {key: {"by": each} for key, each in zip("abcde", by, strict=True)}}
        assert lengths == [2, 3, 3, 3, 3]
        assert process.hear() == "done"


def test_the_controller_reads_its_job_without_calling_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of its `list_partitions` waited a minute for its own answer."""
    from dataplane.integrations.transfer_queue import job_registry
    from dataplane.integrations.transfer_queue.settings import Job

    monkeypatch.setattr(job_registry, "_said", None)
    posted = job_registry.Posted(Job("mine"), "", "")
    job_registry.DataplaneController(posted, {})
    assert job_registry.read() is posted


@pytest.mark.parametrize("method", long("fork", "spawn"))
def test_workers_of_a_loader_have_the_address_of_their_parent(
    driver: Callable[[str], Process], method: str, tmp_path: Path
) -> None:
    """They can not ask Ray, as the loaders of `test_tutorials.py` can not. As a file: spawned ones import it."""
    code = f"""
import os, json
import torch
from tensordict import TensorDict
import dataplane.integrations.transfer_queue as tq
{RAY}
def main():
    start_ray()
    tq.init({{**SMALL, "controller": {{"sampler": "RankAwareSampler"}}}})
    tq.get_client().put(TensorDict({{"x": torch.arange(24)}}, batch_size=[24]), partition_id="p")
    dataset = tq.StreamingDataset(None, 4, 4, ["x"], "p", "train", 0, should_check_consumption_status=True)
    loader = tq.StreamingDataLoader(dataset, num_workers=2, multiprocessing_context="{method}")
    return sorted(row for data, _ in loader for row in data["x"].tolist())
if __name__ == "__main__":
    print("TOLD " + json.dumps(main()), flush=True)
"""
    program = tmp_path / "program.py"
    program.write_text(code)
    run = f"import runpy; runpy.run_path({str(program)!r}, run_name='__main__')"
    if method == "spawn":  # which needs a process whose main module is the file
        run = f"import subprocess; subprocess.run([sys.executable, {str(program)!r}], check=True)"
    with driver(run) as process:
        assert process.hear() == list(range(24))


def test_a_process_forked_before_the_driver_connected_is_refused(driver: Callable[[str], Process]) -> None:
    code = """
        ray = start_ray()
        if not os.fork():
            try:
                tq.kv_list()
            except tq.NotStarted as error:
                tell(str(error))
            os._exit(0)
        os.wait()
    """
    with driver(code) as process:
        assert "connect the parent before it forks" in process.hear()


def test_worker_setup_hooks_of_the_user_are_called_too(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataplane.integrations.transfer_queue import module_patch

    called: list[str] = []
    monkeypatch.setattr(os, "ctermid", lambda: called.append("user's"))
    monkeypatch.setenv(module_patch.VARIABLE, "nested")
    monkeypatch.setenv("DATAPLANE_JOB", "mine")
    monkeypatch.setattr(module_patch, "stand_in", lambda: called.append("ours"))
    monkeypatch.setattr(module_patch, "is_in", lambda: True)
    for hook in (os.ctermid, "os.ctermid"):
        found = module_patch.environment_of_workers({"worker_process_setup_hook": hook, "env_vars": {"A": "1"}})
        assert found["env_vars"] == {module_patch.VARIABLE: "nested", "DATAPLANE_JOB": "mine", "A": "1"}
        found["worker_process_setup_hook"]()
    assert called == ["ours", "user's"] * 2
    monkeypatch.delenv(module_patch.VARIABLE)
    assert module_patch.environment_of_workers({"env_vars": {"A": "1"}}) == {"env_vars": {"A": "1"}}


def test_uninstall_restores_the_runtime_environment_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataplane.integrations.transfer_queue import module_patch

    monkeypatch.setenv("RAY_RUNTIME_ENV_HOOK", "users.hook")
    for _ in range(2):
        module_patch.arrange()
    assert (
        os.environ["RAY_RUNTIME_ENV_HOOK"]
        == "dataplane.integrations.transfer_queue.module_patch.environment_of_workers"
    )
    for _ in range(2):
        module_patch.withdraw()
    assert os.environ["RAY_RUNTIME_ENV_HOOK"] == "users.hook"
    monkeypatch.delenv("RAY_RUNTIME_ENV_HOOK")
    module_patch.arrange()
    module_patch.withdraw()
    assert "RAY_RUNTIME_ENV_HOOK" not in os.environ
