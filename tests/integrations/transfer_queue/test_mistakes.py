"""Mistakes that users make: each is an error that says what to do."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

import dataplane as dp
from tests.integrations.marks import KEPT
from tests.integrations.nursery import Nursery, Process
from tests.users import needs_root

pytestmark = KEPT

HEAD = """
import signal
from pathlib import Path
import dataplane as dp
SMALL = {"backend": {"Dataplane": {"memory": "8MiB", "spill": 0, "prewarm": 0}}}
def error_of(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["no error", ""]
"""


@pytest.fixture
def program(nursery: Nursery) -> Callable[..., Process]:
    """Starts a process that runs a program, with no node or job in its environment unless it is given one."""
    nothing = dict.fromkeys(("DATAPLANE_ADDRESS", "DATAPLANE_JOB"), "")
    return lambda code, **environment: nursery.process(HEAD + textwrap.dedent(code), **{**nothing, **environment})


def test_a_wrong_partition_is_reported_with_a_suggestion(ours: Any, pid: str) -> None:
    ours.kv_put("a", f"{pid}_train", tag={})
    with pytest.raises(ours.NotThere, match=f"no partition '{pid}_trian'.* did you mean '{pid}_train'"):
        ours.kv_batch_get("a", f"{pid}_trian")


def test_calls_before_init_raise_not_started_with_a_remedy(program: Callable[..., Process]) -> None:
    code = """
        found = []
        for call in (tq.get_client, lambda: tq.kv_list(), lambda: tq.save_checkpoint("x")):
            try:
                call()
            except tq.NotStarted as error:
                found.append([str(error), isinstance(error, AssertionError), isinstance(error, RuntimeError)])
        tell(found)
    """
    with program(code) as process:
        found = process.hear()
    assert len(found) == 3
    for said, *kinds in found:
        assert "transfer_queue.init()" in said
        assert "DATAPLANE_ADDRESS" in said
        assert kinds == [True, True]


def test_a_close_after_the_node_was_killed_ends_the_job(program: Callable[..., Process]) -> None:
    code = """
        from dataplane.integrations import process
        from dataplane.integrations.transfer_queue import job_registry
        done = []
        job_registry.clear = lambda: done.append("cleared")
        tq.init(SMALL)
        tq.kv_put("a", "p", tag={})
        os.kill(process.plane().stats().pid, signal.SIGKILL)
        tq.close()
        tq.init(SMALL)
        tell([done, tq.kv_list()])
    """
    with program(code) as process:
        assert process.hear() == [["cleared"], {}]


@pytest.mark.parametrize(
    ("first", "then", "match"),
    [
        ({"controller": {"sampler": "RankAwareSampler"}}, {"controller": {"sampler": "SequentialSampler"}}, "sampler"),
        ({"controller": {"polling_mode": True}}, {"controller": {"polling_mode": False}}, "polling_mode"),
        ({"backend": {"Dataplane": {"dense": True}}}, {"backend": {"Dataplane": {"dense": False}}}, "dense"),
    ],
)
def test_a_second_init_with_other_settings_is_misuse(
    program: Callable[..., Process], node: str, first: Any, then: Any, match: str
) -> None:
    code = f"""
        tq.init({first!r}, job="twice {match}")
        conf = [tq.init(), tq.init({first!r})]
        told = error_of(lambda: tq.init({then!r}, job="twice {match}"))
        tell([told, [each["controller"]["sampler"] for each in conf]])
        tq.close()
    """
    with program(code, DATAPLANE_ADDRESS=node) as process:
        (kind, said), samplers = process.hear()
    assert kind == "Misuse"
    assert f"{match} = " in said
    assert "close() in the first process" in said
    assert samplers == [first.get("controller", {}).get("sampler", "SequentialSampler")] * 2


def test_an_init_that_fails_after_its_claim_leaves_no_settings(program: Callable[..., Process], node: str) -> None:
    code = """
        import numpy as np
        from dataplane.integrations import process
        sampler = tq.GRPOGroupNSampler(n_samples_per_prompt=2)
        given, sampler.n_samples_per_prompt = {"controller": {"sampler": sampler}}, object()
        told = error_of(lambda: tq.init(given, job="failed"))
        left = [name for name in process.plane().tables() if name.endswith("/failed")]
        sampler.n_samples_per_prompt = np.int64(2)
        tq.init(given, job="failed")
        tell([told[0], left, error_of(lambda: tq.init({"controller": {"sampler": "RankAwareSampler"}}))[1]])
        tq.close()
    """
    with program(code, DATAPLANE_ADDRESS=node) as process:
        kind, left, said = process.hear()
    assert kind == "Misuse"
    assert left == []
    assert "GRPOGroupNSampler(n_samples_per_prompt=2" in said


def test_an_init_follows_a_process_that_was_killed_after_its_claim(program: Callable[..., Process], node: str) -> None:
    first = """
        claim = dp.Table.claim
        dp.Table.claim = lambda *args, **kwargs: (claim(*args, **kwargs), os.kill(os.getpid(), signal.SIGKILL))
        tq.init(job="killed")
    """
    then = """
        from dataplane.integrations.transfer_queue import settings
        settings._WAIT_S = 0.1
        tq.init(job="killed")
        tell(tq.kv_list())
        tq.close()
    """
    with program(first, DATAPLANE_ADDRESS=node) as process:
        process.wait()
    with program(then, DATAPLANE_ADDRESS=node) as process:
        assert process.hear() == {}


@pytest.mark.parametrize(
    ("conf", "match"),
    [
        ({"backend": {"storage_backend": "Datplane"}}, "no backend 'Datplane': did you mean Dataplane?"),
        ({"backend": {"Datplane": {}}}, "no setting 'backend.Datplane': did you mean backend.Dataplane?"),
        (
            {"backend": {"Dataplane": {"dence": True}}},
            "'backend.Dataplane.dence': did you mean backend.Dataplane.dense?",
        ),
        ({"backend": {"Dataplane": {"memory": "much"}}}, "backend.Dataplane: memory is bytes, or a number"),
        ({"backend": {"Dataplane": {"transports": "tcp,smoke"}}}, "transports are some of tcp, ucx, nixl"),
        ({"backend": {"Dataplane": {"dense": "yes"}}}, "dense is true or false"),
        ({"backend": {"Dataplane": {"transports": 5}}}, "transports is a list of names"),
        ({"metrics": {"enabled": True, "port": "abc"}}, "metrics.port is a number"),
        ({"controler": {}}, "no setting 'controler': did you mean controller?"),
        ({"backend": {5: 1}}, "no setting 'backend.5'"),
        ({"controller": {"sampler": "RankAwareSampeler"}}, "did you mean RankAwareSampler?"),
        ({"controller": "SequentialSampler"}, "controller is a mapping of settings, not str"),
        ({"zzz": 1}, "there are enable, metrics, controller, backend"),
    ],
)
def test_an_invalid_setting_is_misuse_and_a_value_error(ours: Any, conf: Any, match: str) -> None:
    with pytest.raises(dp.Misuse, match=match.replace("?", r"\?")) as raised:
        ours.init(conf)
    assert isinstance(raised.value, ValueError)


def test_jobs_on_one_host_share_keys_only_under_one_name(
    program: Callable[..., Process], tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = dp.NodeConfig(memory="16MiB", spill=0, prewarm=0)
    first = """
        tq.init()
        tq.kv_put("a", "train", tag={"of": "first"})
        tell("ready"); sys.stdin.readline()
        tell(tq.kv_list())
    """
    named = """
        tq.init(job="mine")
        tq.kv_put("a", "train", tag={"of": "mine"})
        tell(tq.kv_list())
    """
    second = "tell([error_of(tq.init), error_of(tq.kv_list)])"
    shared = "tq.init(job='mine'); tell(tq.kv_list())"
    before = os.environ.get("DATAPLANE_ADDRESS")
    with dp.connect(config=config) as plane:
        told = {"DATAPLANE_ADDRESS": plane.address}
        with program(first, **told) as one:
            one.hear()
            with program(second, **told) as other:
                (kind, said), (unknown, line) = other.hear()
            assert (kind, unknown) == ("Misuse", "NotStarted")
            assert "init(job=...)" in said
            assert "DATAPLANE_JOB" in said
            assert "init(job=...)" in line
            with program(named, **told) as other:
                assert other.hear() == {"train": {"a": {"of": "mine"}}}
                with program(shared, **told) as third:
                    assert third.hear() == {"train": {"a": {"of": "mine"}}}
                with program("tell(tq.kv_list())", **told, DATAPLANE_JOB="mine") as third:
                    assert third.hear() == {"train": {"a": {"of": "mine"}}}
            one.say()
            assert one.hear() == {"train": {"a": {"of": "first"}}}
    if before is not None:
        os.environ["DATAPLANE_ADDRESS"] = before


@pytest.mark.parametrize("name", ["", "a/b", "a:b", 7, "x" * 129])
def test_an_invalid_job_name_is_a_value_error(ours: Any, name: Any) -> None:
    with pytest.raises(ValueError, match="a job's name is a text"):
        ours.init(job=name)


@pytest.mark.long
def test_calls_after_a_ray_restart_require_another_init(program: Callable[..., Process]) -> None:
    code = """
        import ray
        start = lambda: ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=128 << 20,
                                 log_to_driver=False)
        start()
        tq.init(SMALL)
        tq.kv_put("a", "p", tag={})
        ray.shutdown()
        start()
        told = error_of(lambda: tq.kv_list())
        tq.init(SMALL)
        tell([told, tq.kv_list()])
        tq.kv_put("b", "p", {"x": torch.ones(2)})
        tell([tq.kv_list(), tq.kv_batch_get("b", "p")["x"].shape[0]])
    """
    with program(code) as process:
        (kind, said), seen = process.hear()
        assert kind == "NotStarted"
        assert "call init() again" in said
        assert seen == {}
        assert process.hear() == [{"p": {"b": {}}}, 1]


def test_a_full_disk_budget_is_backpressure_with_a_remedy(program: Callable[..., Process]) -> None:
    code = """
        tq.init({"backend": {"Dataplane": {"memory": "4MiB", "spill": "1MiB", "prewarm": 0}}})
        from dataplane.client import sync
        write = sync.Table.upsert_and_look
        sync.Table.upsert_and_look = lambda *args, **kwargs: write(*args, **{**kwargs, "timeout": 0.5})
        put = lambda i: tq.kv_put(f"k{i}", "p", {"x": torch.full((1 << 20,), i, dtype=torch.uint8)})
        tell(error_of(lambda: [put(i) for i in range(12)]))
    """
    with program(code) as process:
        kind, said = process.hear()
    assert kind == "Backpressure"
    assert "the disk budget is full" in said
    assert "free rows" in said
    assert "more `memory` or `spill`" in said


def test_a_failed_put_with_a_group_sampler_leaves_no_rows(program: Callable[..., Process]) -> None:
    """They are made before the values are stored, and stayed, without any."""
    code = """
        tq.init({"controller": {"sampler": "GRPOGroupNSampler"}, **SMALL})
        tq.kv_put("tagged", "p", tag={"status": "running"})
        fields = TensorDict({"x": torch.arange(6 << 20).view(3, -1)}, batch_size=[3])
        tell([error_of(lambda: tq.kv_batch_put(["a", "tagged", "b"], "p", fields=fields))[0], tq.kv_list("p")])
    """
    with program(code) as process:
        assert process.hear() == ["LimitExceeded", {"p": {"tagged": {"status": "running"}}}]


@needs_root
def test_a_node_of_another_user_is_refused_with_a_remedy(program: Callable[..., Process], node: str) -> None:
    code = """
        import dataplane.client.sync, dataplane.client.connection, transfer_queue
        os.setgid(65534); os.setuid(65534)
        tell(error_of(lambda: tq.init(job="x")))
    """
    with program(code, DATAPLANE_ADDRESS=node) as process:
        kind, said = process.hear()
    assert kind == "Unauthenticated"
    assert "start a node as this user" in said
