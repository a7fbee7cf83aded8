"""Train a GPT-2 in a loop of one's own with Hugging Face Accelerate and DeAR: ``attach`` before ``prepare``.

    torchrun --nproc-per-node 2 recipes/with_accelerate.py
    torchrun --nproc-per-node 2 recipes/with_accelerate.py --hook topk --accumulate 4
    torchrun --nproc-per-node 2 recipes/with_accelerate.py --save-every 50 --output runs/gpt2
    torchrun --nproc-per-node 2 recipes/with_accelerate.py --resume runs/gpt2/checkpoint-50
    accelerate launch recipes/with_accelerate.py --tracker tensorboard

Accumulation, clipping, trackers and checkpoints are Accelerate's own. A run that resumes takes the steps that the first
run would have taken. The model is small and reads bytes; the text is Python's own documentation unless ``--text`` names
yours.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader
from tqdm import tqdm, trange
from transformers import get_linear_schedule_with_warmup

from ddp_hooks import DearConfig, TopKConfig
from ddp_hooks.integrations.accelerate import attach
from recipes.common.byte_text import load_blocks, make_gpt2
from recipes.common.texts import add_text_arguments, positive, read_texts

HOOKS: dict[str, Any] = {"dear": DearConfig(), "topk": TopKConfig(density=0.05, dense_below_numel=1000), "none": None}


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    texts = read_texts(args)  # before ranks wait for each other: what fails here fails on all of them
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=args.accumulate,
        log_with=args.tracker,
        # The seed of a shuffle depends on the epoch, so a run that resumes draws the same batches.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
        project_dir=args.output,
    )
    hook = HOOKS[args.hook]
    attachment = attach(accelerator, hook) if hook is not None else None

    blocks, _ = load_blocks(texts, args.block_length)
    set_seed(args.seed)  # every rank draws the same initial weights
    model: Any = make_gpt2(args.block_length)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr)
    ranks = accelerator.num_processes  # Accelerate steps a schedule once for every rank
    schedule: Any = get_linear_schedule_with_warmup(optimizer, max(1, args.steps // 10) * ranks, args.steps * ranks)
    # Without a generator a loader that resumes within an epoch would draw from the one of dropout.
    loader: Any = DataLoader(blocks, args.batch_size, shuffle=True, drop_last=True, generator=torch.Generator())
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    accelerator.init_trackers("with_accelerate")

    set_seed(args.seed, device_specific=True)  # every rank drops other activations, if the model has dropout
    first = 0
    if args.resume is not None:
        accelerator.load_state(str(args.resume))
        first = int(args.resume.name.removeprefix("checkpoint-"))
    batches = batches_after(first * args.accumulate, accelerator, loader)
    model.train()
    for step in trange(first + 1, args.steps + 1, disable=not accelerator.is_main_process):
        for _ in range(args.accumulate):
            with accelerator.accumulate(model):
                loss = model(**next(batches)).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.clip)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if step % args.log_every == 0:
            mean: Any = accelerator.reduce(loss.detach(), "mean")
            accelerator.log({"loss": mean.item(), **(attachment.stats() if attachment is not None else {})}, step=step)
            if accelerator.is_main_process:
                tqdm.write(f"step {step:5d}   loss {mean.item():.4f}")
        if args.save_every is not None and step % args.save_every == 0:
            accelerator.save_state(str(args.output / f"checkpoint-{step}"))
    accelerator.end_training()


def batches_after(number: int, accelerator: Accelerator, loader: Any) -> Iterator[Any]:
    """Yield batches without end, in another order in every epoch, without the first ones."""
    first, done = divmod(number, len(loader))
    for epoch in itertools.count(first):
        loader.set_epoch(epoch)
        yield from accelerator.skip_first_batches(loader, done) if epoch == first else loader


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT-2 with Accelerate and DeAR.")
    add = parser.add_argument
    add("--hook", choices=HOOKS, default="dear", help="DeAR, sparse all-reduce or plain DDP")
    add("--steps", type=positive, default=100)
    add("--batch-size", type=positive, default=8, help="blocks per rank and backward")
    add("--block-length", type=positive, default=128, help="bytes that the model sees at once")
    add("--accumulate", type=positive, default=1, metavar="BATCHES", help="per step and rank")
    add("--lr", type=float, default=2e-3)
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--log-every", type=positive, default=10, metavar="STEPS")
    add("--save-every", type=positive, metavar="STEPS", help="checkpoints, in the folder of --output")
    add("--output", type=Path, default=Path("build/with_accelerate"), metavar="FOLDER")
    add("--resume", type=Path, metavar="FOLDER", help="a checkpoint to go on from")
    add("--tracker", choices=["tensorboard"], help="writes into the folder of --output")
    add("--seed", type=int, default=0)
    add_text_arguments(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
