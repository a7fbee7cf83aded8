"""One worker of the Trainers' benchmark, started once per rank: `python -m … JOB.json`."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from ddp_hooks.integrations.transformers import CommHookMixin
from recipes.benchmarks.trainer_job import VARIANTS, TrainerJob
from recipes.benchmarks.worker import over_ranks, report, run

VOCABULARY = 8192
SEQUENCE = 64


class HookedTrainer(CommHookMixin, transformers.Trainer):
    """With `comm_hook=None` it is the plain one."""


class Clock(TrainerCallback):
    """When steps end."""

    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """The Trainer calls it."""
        self.ends_s.append(time.perf_counter())


def main() -> None:
    job = TrainerJob.load(Path(sys.argv[1]))
    # What torchrun sets, so that a Trainer takes part in the group that is there.
    launched = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
    os.environ |= launched | dict(os.environ)
    transformers.logging.set_verbosity_error()
    run(job, lambda: compare(job))


def compare(job: TrainerJob) -> dict[str, Any]:
    """Runs every variant once per round, so that slow phases of the machine hit all of them alike."""
    windows: dict[str, list[dict[str, float]]] = {name: [] for name in job.variants}
    num_parameters = 0
    for round_index in range(job.rounds):
        for name in job.variants:
            window, num_parameters = train(job, name)
            windows[name].append(window)
            report(f"round {round_index + 1}/{job.rounds} {name}: {window['step_s']:.3f} s per step")
    return {"windows": windows, "num_parameters": num_parameters}


def train(job: TrainerJob, name: str) -> tuple[dict[str, float], int]:
    """A Trainer of its own: the median of its steps, of the slowest rank, the last loss, and its size."""
    settings, hook = VARIANTS[name]
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_layer": job.layers, "n_embd": job.hidden, "n_head": max(1, job.hidden // 64)}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=SEQUENCE, **sizes))
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            use_cpu=True,
            ddp_backend="gloo",
            max_steps=job.warmup_steps + job.timed_steps + 1,
            per_device_train_batch_size=job.tokens // SEQUENCE,
            optim="adamw_torch",
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
            **settings,
        )
        data: Any = texts(job)
        trainer = HookedTrainer(model=model, args=args, train_dataset=data, callbacks=[clock], comm_hook=hook)
        loss = trainer.train().training_loss
        trainer._detach()
    steps_s = [later - sooner for sooner, later in zip(clock.ends_s, clock.ends_s[1:], strict=False)]
    timed_s = statistics.median(steps_s[job.warmup_steps :])
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    del trainer, model
    gc.collect()  # DDP and its reducer refer to each other
    dist.barrier()
    return {"step_s": over_ranks([timed_s], dist.ReduceOp.MAX)[0], "loss": loss}, num_parameters


def texts(job: TrainerJob) -> Sequence[dict[str, Tensor]]:
    """Random tokens, as many as the run needs."""
    steps = job.warmup_steps + job.timed_steps + 1
    number = steps * dist.get_world_size() * job.tokens // SEQUENCE
    ids = torch.randint(0, VOCABULARY, (number, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


if __name__ == "__main__":
    main()
