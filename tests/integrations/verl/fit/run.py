"""One run of verl's trainer: `python -m verl.trainer.main_ppo`, with what its user says on the command line."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from . import hang
from .model import CUT, LETTERS, id_of, ids

ROOT = Path(__file__).parents[4]
_WAITING = (  # for what has been cut: each step trains with the prompts that a synchronous one does
    "trainer.v1.sampler.max_off_policy_strategy=wait",
    "trainer.v1.sampler.max_off_policy_threshold=2",
)
_TO_SAY = 15.0  # seconds before a run's time is over, for its processes to write where they are
STORES = ("SimpleStorage", "Dataplane")


@dataclass(frozen=True)
class Job:
    """What one run is: `store` one of STORES, or "module", which is "Dataplane" by the environment in place of the
    configuration; sizes in prompts, of which each has so many responses.

    `timed` writes times in place of rows (`bench.doors_fit_times`).
    """

    model: Path
    train: Path
    validation: Path
    directory: Path
    store: str
    mode: str = "sync"
    steps: int = 2
    prompts: int = 4
    responses: int = 2
    ranks: int = 1
    prompt_length: int = 64
    checkpoints: Path | None = None
    memory: str = "256MiB"
    timed: bool = False
    overrides: Sequence[str] = ()

    def resumed(self, directory: Path, steps: int) -> Job:
        """The job once more, from the checkpoint of this one."""
        directory.mkdir()
        return replace(self, directory=directory, steps=steps, checkpoints=self.directory / "checkpoints")

    @property
    def record(self) -> Path:
        """Where what it sees is written."""
        return self.directory / "record"

    def arguments(self) -> list[str]:
        fit = Path(__file__).parent
        asynchronous = self.mode != "sync"
        buffer = "BufferAsync" if asynchronous else "Buffer"
        rollout, trainer = "actor_rollout_ref.rollout", "trainer"
        scripted = f"+{rollout}.engine_kwargs.scripted"
        return [
            f"hydra.run.dir={self.directory}/hydra",
            "hydra.output_subdir=null",
            f"data.train_files={self.train}",
            f"data.val_files={self.validation}",
            f"data.custom_cls.path={fit}/data.py",
            "data.custom_cls.name=Data",
            f"+data.cache_dir={self.directory}/cache",
            f"data.train_batch_size={self.prompts}",
            "data.dataloader_num_workers=0",
            "data.shuffle=false",
            f"data.max_prompt_length={self.prompt_length}",
            "data.max_response_length=8",
            "algorithm.adv_estimator=grpo",
            "actor_rollout_ref.nccl_timeout=60",
            f"actor_rollout_ref.model.path={self.model}",
            "actor_rollout_ref.model.external_lib=fit.parts",
            "actor_rollout_ref.actor.strategy=fsdp2",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.prompts}",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
            "actor_rollout_ref.actor.use_kl_loss=true",
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=2",
            f"{rollout}.name=scripted",
            f"{rollout}.n={self.responses}",
            f"{rollout}.tensor_model_parallel_size=1",
            f"{rollout}.log_prob_micro_batch_size_per_gpu=2",
            f"{rollout}.agent.num_workers=1",
            f"{rollout}.agent.default_agent_loop=seeded",
            f"{rollout}.agent.agent_loop_config_path={fit}/agent.yaml",
            f"{scripted}.words={[id_of(letter) for letter in LETTERS]}".replace(" ", ""),
            f"{scripted}.eos={ids()['<|im_end|>']}",
            f"{scripted}.cut_token={id_of(CUT) if asynchronous else 'null'}",
            "reward.num_workers=1",
            f"reward.custom_reward_function.path={fit}/reward.py",
            f"{trainer}.device=cpu",
            f"{trainer}.n_gpus_per_node={self.ranks}",
            f"{trainer}.logger=[file]",
            f"{trainer}.total_training_steps={self.steps}",
            f"{trainer}.default_local_dir={self.checkpoints or self.directory / 'checkpoints'}",
            f"{trainer}.test_freq={self.steps}",
            f"{trainer}.rollout_data_dir={self.directory}/rollouts",
            f"{trainer}.v1.trainer_mode={self.mode}",
            f"{trainer}.v1.sampler.custom_sampler.path={fit}/sampler.py",
            f"{trainer}.v1.sampler.custom_sampler.name={buffer}",
            "+ray_kwargs.ray_init.address=local",
            "+ray_kwargs.ray_init.num_gpus=4",
            "ray_kwargs.ray_init.num_cpus=24",
            "+ray_kwargs.ray_init.include_dashboard=false",
            "+ray_kwargs.ray_init.object_store_memory=200000000",
            *(_WAITING if asynchronous else ()),
            *self._storage(),
            *self.overrides,
        ]

    def _storage(self) -> list[str]:
        queue = "transfer_queue.backend"
        return {
            "SimpleStorage": [f"{queue}.SimpleStorage.num_data_storage_units=1"],
            "Dataplane": [f"{queue}.storage_backend=Dataplane", f"+{queue}.Dataplane.memory={self.memory}"],
            "module": [f"+{queue}.Dataplane.memory={self.memory}"],
        }[self.store]

    def environment(self) -> dict[str, str]:
        """Its processes' environment: Ray's inherit it."""
        path = [str(Path(__file__).parents[1]), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        asked = {"DATAPLANE_TRANSFER_QUEUE": "nested"} if self.store == "module" else {}
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "DATAPLANE_"))}
        return {
            **kept,
            **asked,
            "PYTHONPATH": os.pathsep.join(path),
            "VERL_USE_EXTERNAL_MODULES": "fit.cpu",
            "VERL_PLATFORM": "cpu",
            "VERL_FILE_LOGGER_PATH": str(self.directory / "metrics.jsonl"),
            ("FIT_TIMES" if self.timed else "FIT_RECORD"): str(self.record),
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(self.directory / "hf"),
            "VERL_REPLAY_BUFFER_DEBUG_INTERVAL_SECONDS": "20",
            "RAY_worker_niceness": "0",  # 15 by default: none of the processor where others work
            "RAY_enable_worker_prestart": "0",
            "RAY_prestart_worker_first_driver": "0",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }

    def run(self, timeout: float = 300) -> None:
        """Run it to its end. Raises AssertionError with the end of its log where it fails or takes longer; in that
        case with where its processes were (`hang`) too."""
        self.record.mkdir(parents=True, exist_ok=True)
        log, stacks = self.directory / "log", self.directory / "stacks"
        command = [sys.executable, "-W", "ignore", "-m", "verl.trainer.main_ppo", *self.arguments()]
        asked = {"FIT_HANG": str(stacks), "FIT_DEADLINE": str(time.time() + timeout - _TO_SAY)}
        with log.open("ab") as out:
            running = subprocess.Popen(
                command,
                env=self.environment() | asked,
                stdout=out,
                stderr=out,
                cwd=self.directory,
                start_new_session=True,
            )
            try:
                code = running.wait(timeout)
            except subprocess.TimeoutExpired:
                code = f"not done after {timeout:.0f} s:\n{hang.said(stacks)}"
                _end(running)
        assert code == 0, f"{self.store}, {self.mode}: {code}\n{log.read_text(errors='replace')[-6000:]}"


def _end(running: subprocess.Popen[bytes]) -> None:
    """End it, and the processes of its session that outlive it."""
    running.terminate()
    try:
        running.wait(30)
    except subprocess.TimeoutExpired:
        running.kill()
        running.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
