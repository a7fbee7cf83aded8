"""Work of one worker of the Trainers' benchmark."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from ddp_hooks.integrations.transformers import CommHookMixin
from recipes.benchmarks.harness.worker import slowest, take_turns
from recipes.benchmarks.trainer import VARIANTS, TrainerJob

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


def train_in_turns(job: TrainerJob) -> dict[str, Any]:
    """Train with all variants in turns."""
    # What torchrun sets, so that a Trainer takes part in the group that is there.
    launched = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "ACCELERATE_USE_CPU": "true"}
    os.environ |= launched | dict(os.environ)
    transformers.logging.set_verbosity_error()
    windows = take_turns(job.variants, job.rounds, lambda name: train(job, name))
    num_parameters = sum(parameter.numel() for parameter in make_model(job).parameters())
    return {"windows": windows, "num_parameters": num_parameters}


def make_model(job: TrainerJob) -> GPT2LMHeadModel:
    sizes: dict[str, Any] = {"n_layer": job.layers, "n_embd": job.hidden, "n_head": max(1, job.hidden // 64)}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=SEQUENCE, **sizes))


def train(job: TrainerJob, name: str) -> dict[str, float]:
    """Train with a Trainer of its own; return the median of its steps, of the slowest rank, and the last loss."""
    settings, hook = VARIANTS[name]
    torch.manual_seed(0)
    model = make_model(job)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            use_cpu=True,
            ddp_backend="gloo",
            max_steps=job.warmup + job.steps + 1,
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
    timed_s = statistics.median(steps_s[job.warmup :])
    dist.barrier()
    return {"step_s": slowest(timed_s)[0], "loss": loss}


def texts(job: TrainerJob) -> Sequence[dict[str, Tensor]]:
    """Random tokens, as many as the run needs."""
    steps = job.warmup + job.steps + 1
    number = steps * dist.get_world_size() * job.tokens // SEQUENCE
    ids = torch.randint(0, VOCABULARY, (number, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]

