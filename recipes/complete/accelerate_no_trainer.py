"""Train a GPT-2 in a loop of one's own with Hugging Face Accelerate, with plain DDP, DeAR or sparse all-reduce.

    torchrun --nproc-per-node 2 recipes/complete/accelerate_no_trainer.py
    torchrun --nproc-per-node 2 recipes/complete/accelerate_no_trainer.py --hook topk --accumulate 4
    torchrun --nproc-per-node 2 recipes/complete/accelerate_no_trainer.py --save-every 50
    torchrun --nproc-per-node 2 recipes/complete/accelerate_no_trainer.py --resume build/recipes/checkpoint-50
    torchrun --nproc-per-node 2 recipes/complete/accelerate_no_trainer.py --tracker tensorboard
    accelerate launch recipes/complete/accelerate_no_trainer.py --model openai-community/gpt2 --lr 5e-5 \\
        --dataset Salesforce/wikitext --dataset-config wikitext-2-raw-v1

The model is that of ``gpt2_clm_trainer.py``. The hook is one line, ``attach``, before ``prepare``; accumulation,
clipping and checkpoints are Accelerate's own. A run that resumes takes the steps that the first run would have taken.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `recipes`, when this file runs as a script

from ddp_hooks import DearConfig, TopKConfig
from ddp_hooks.integrations.accelerate import Attachment, attach
from recipes.common.record import Record, all_reduce_mb, command_of, mean_stats, now, report, surroundings
from recipes.common.texts import positive, read_texts
from recipes.complete.gpt2_clm_trainer import make_task
from recipes.complete.trainer_base import Task, make_parser, parse

RECIPE = "accelerate_no_trainer"


@dataclass
class Progress:
    """How far training has come; Accelerate saves it with the rest.

    Args:
        step: of the optimizer.
        batch: of this rank, since the beginning.
        losses: of training, mean over ranks: pairs of step and loss.
        stats: of the hook, in the same steps.
    """

    step: int = 0
    batch: int = 0
    losses: list[list[float]] = field(default_factory=list)
    stats: list[dict[str, float]] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        vars(self).update(state)


def main(argv: Sequence[str] | None = None) -> Record:
    args = parse_arguments(argv)
    texts = read_texts(args)  # before ranks wait for each other: what fails here fails on all of them
    accelerator = make_accelerator(args)
    task = make_task(args, texts)
    loop = prepare(args, accelerator, task)
    accelerator.init_trackers(RECIPE)
    progress = train(args, accelerator, loop)
    held_out_loss = evaluate(accelerator, loop.model, loop.held_out)
    sent_mb, stall_s = mean_stats(progress.stats)
    if args.hook == "none":
        sent_mb = all_reduce_mb(task.model.parameters(), accelerator.num_processes)
    record = Record(
        recipe=RECIPE,
        hook=args.hook,
        command=command_of(RECIPE, argv),
        created=now(),
        environment=surroundings(),
        data=task.data,
        num_workers=accelerator.num_processes,
        steps=progress.step,
        losses=progress.losses,
        held_out={"loss": held_out_loss},
        sent_mb_per_step=sent_mb,
        stall_s_per_step=stall_s,
        model=task.about,
    )
    if accelerator.is_main_process:
        report(record, args.output)
    accelerator.end_training()
    return record


def make_accelerator(args: argparse.Namespace) -> Accelerator:
    """Ranks on GPUs, or on CPUs if there are none; joins those that a launcher started."""
    return Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=args.accumulate,
        log_with=args.tracker,
        # Seeds of the order of batches are counted by epoch, so a run that resumes draws the same ones.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
        project_dir=args.output,
    )


@dataclass(frozen=True)
class Loop:
    """What a loop works with, as Accelerate has prepared it.

    Args:
        model, optimizer, schedule, training, held_out: as in any loop.
        attachment: of the hook; None with plain DDP.
    """

    model: nn.Module
    optimizer: Any
    schedule: Any
    training: Any
    held_out: Any
    attachment: Attachment | None

    def stats(self) -> dict[str, float]:
        """Of the hook, on this rank, in the last step."""
        return self.attachment.stats() if self.attachment is not None else {}


def prepare(args: argparse.Namespace, accelerator: Accelerator, task: Task) -> Loop:
    """Everything wrapped for several ranks, and the hook attached."""
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=args.lr)
    # Accelerate steps a schedule once for every rank.
    num_ranks = accelerator.num_processes
    schedule = get_linear_schedule_with_warmup(optimizer, max(1, args.steps // 10) * num_ranks, args.steps * num_ranks)
    training: DataLoader[Any] = DataLoader(
        task.training,
        args.batch_size,
        shuffle=True,
        collate_fn=task.collate,
        drop_last=True,
        generator=torch.Generator(),  # without one, a loader that resumes within an epoch would draw from dropout's
    )
    held_out: DataLoader[Any] = DataLoader(task.held_out, args.batch_size, collate_fn=task.collate)
    hook = hook_of(args)
    attachment = attach(accelerator, hook) if hook is not None else None
    model, optimizer, schedule, training, held_out = accelerator.prepare(
        task.model, optimizer, schedule, training, held_out
    )
    return Loop(model, optimizer, schedule, training, held_out, attachment)


def train(args: argparse.Namespace, accelerator: Accelerator, loop: Loop) -> Progress:
    """The training loop, the same with every hook."""
    set_seed(args.seed, device_specific=True)  # every rank drops different activations, the same in every run
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if args.resume is not None:
        accelerator.load_state(str(args.resume))
    loop.model.train()
    losses: list[Tensor] = []  # of the batches since the last line of the log
    for batch in batches_after(progress.batch, accelerator, loop.training):
        with accelerator.accumulate(loop.model):
            loss = loop.model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(loop.model.parameters(), args.clip)
            loop.optimizer.step()
            loop.schedule.step()
            loop.optimizer.zero_grad()
        progress.batch += 1
        losses.append(loss.detach())
        if accelerator.sync_gradients:
            progress.step += 1
            if progress.step % args.log_every == 0:
                mean: Any = accelerator.reduce(torch.stack(losses).mean(), "mean")
                log(accelerator, progress, mean.item(), loop.stats())
                losses.clear()
            if args.save_every is not None and progress.step % args.save_every == 0:
                accelerator.save_state(str(args.output / f"checkpoint-{progress.step}"))
            if progress.step >= args.steps:
                break
    return progress


def batches_after(number: int, accelerator: Accelerator, loader: Any) -> Iterator[dict[str, Tensor]]:
    """Batches without end, in another order in every epoch, without so many at the beginning."""
    first, done = divmod(number, len(loader))
    for epoch in itertools.count(first):
        loader.set_epoch(epoch)
        yield from accelerator.skip_first_batches(loader, done) if epoch == first else loader


def log(accelerator: Accelerator, progress: Progress, loss: float, stats: dict[str, float]) -> None:
    """Keep, print and track what a step has shown."""
    progress.losses.append([progress.step, loss])
    progress.stats.append(stats)
    accelerator.log({"loss": loss, **stats}, step=progress.step)
    accelerator.print(f"step {progress.step:5d}   loss {loss:.4f}", flush=True)


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: nn.Module, held_out: Any) -> float:
    """Mean loss of held-out blocks, each counted once on whichever rank it was."""
    model.eval()
    losses = []
    for batch in held_out:
        loss: Tensor = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    return torch.cat(losses).mean().item()


# Command line -------------------------------------------------------------------------------------------


def hook_of(args: argparse.Namespace) -> DearConfig | TopKConfig | None:
    """What ``--hook`` asks for."""
    if args.hook == "none":
        return None
    if args.hook == "dear":
        return DearConfig()
    return TopKConfig(density=args.density, warmup_steps=args.steps // 4)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("Train a GPT-2 in a loop of one's own with Accelerate.", hooks=["dear", "topk", "none"])
    parser.add_argument("--density", type=float, default=0.05, help="part of the gradient that is sent, with topk")
    parser.add_argument("--accumulate", type=positive, default=1, metavar="BATCHES", help="per step and rank")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--save-every", type=positive, metavar="STEPS", help="checkpoints, in the folder of --output")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="a checkpoint to go on from")
    parser.add_argument("--tracker", choices=["tensorboard"], help="writes into the folder of --output")
    args = parse(parser, argv)
    if args.resume is not None and not args.resume.is_dir():
        parser.error(f"--resume expects the folder of a checkpoint, found none at {args.resume}")
    return args


if __name__ == "__main__":
    main()
