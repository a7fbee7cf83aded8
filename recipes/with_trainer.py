"""Train a GPT-2 with the Hugging Face Trainer and DeAR: a mixin and ``comm_hook=`` are all it takes.

    torchrun --nproc-per-node 2 recipes/with_trainer.py
    torchrun --nproc-per-node 2 recipes/with_trainer.py --hook topk
    torchrun --nproc-per-node 2 recipes/with_trainer.py --save-every 50 --output runs/gpt2
    torchrun --nproc-per-node 2 recipes/with_trainer.py --output runs/gpt2 --resume

The model is small and reads bytes; the text is Python's own documentation unless ``--text`` names yours.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, set_seed

from ddp_hooks import DearConfig, TopKConfig
from ddp_hooks.integrations.transformers import CommHookMixin
from recipes.common.byte_text import load_blocks, make_gpt2
from recipes.common.texts import add_text_arguments, positive, read_texts

HOOKS: dict[str, Any] = {"dear": DearConfig(), "topk": TopKConfig(density=0.05, dense_below_numel=1000), "none": None}


class HookTrainer(CommHookMixin, Trainer):
    """A Trainer that takes ``comm_hook``. Your own subclass of Trainer may stand in its place."""


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    texts = read_texts(args)  # before ranks wait for each other: what fails here fails on all of them
    settings = make_settings(args)  # joins the ranks that torchrun started
    training, held_out = load_blocks(texts, args.block_length)
    set_seed(args.seed)  # every rank draws the same initial weights
    trainer = HookTrainer(
        model=make_gpt2(args.block_length),
        args=settings,
        train_dataset=training,
        eval_dataset=held_out,
        comm_hook=HOOKS[args.hook],
    )
    trainer.train(resume_from_checkpoint=args.resume)
    print_on_first = print if trainer.is_world_process_zero() else lambda *_: None
    print_on_first(f"loss on held-out text {trainer.evaluate()['eval_loss']:.4f}")
    trainer.accelerator.end_training()


def make_settings(args: argparse.Namespace) -> TrainingArguments:
    """Return settings for a GPU per rank, or for ranks on CPUs; make the process group if there are several ranks."""
    on_cpu = not torch.cuda.is_available()
    settings = TrainingArguments(
        output_dir=str(args.output),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        learning_rate=args.lr,
        warmup_steps=max(1, args.steps // 10),
        logging_steps=args.log_every,
        seed=args.seed,
        save_strategy="no" if args.save_every is None else "steps",
        save_steps=args.save_every or 500,
        report_to=[],
        dataloader_drop_last=True,
        dataloader_pin_memory=not on_cpu,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and "RANK" in os.environ else None,  # one process alone has no group
        ddp_find_unused_parameters=False,
    )
    _ = settings.device  # where transformers makes the group
    return settings


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT-2 with the Hugging Face Trainer and DeAR.")
    add = parser.add_argument
    add("--hook", choices=HOOKS, default="dear", help="DeAR, sparse all-reduce or plain DDP")
    add("--steps", type=positive, default=100)
    add("--batch-size", type=positive, default=8, help="blocks per rank and step")
    add("--block-length", type=positive, default=128, help="bytes that the model sees at once")
    add("--lr", type=float, default=2e-3)
    add("--log-every", type=positive, default=10, metavar="STEPS")
    add("--save-every", type=positive, metavar="STEPS", help="checkpoints, in the folder of --output")
    add("--output", type=Path, default=Path("build/with_trainer"), metavar="FOLDER")
    add("--resume", action="store_true", help="go on from the last checkpoint in --output")
    add("--seed", type=int, default=0)
    add_text_arguments(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
