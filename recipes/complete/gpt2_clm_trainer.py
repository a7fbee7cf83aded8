"""Train a GPT-2 as a causal language model with the Hugging Face Trainer, with plain DDP, DeAR or sparse all-reduce.

    torchrun --nproc-per-node 2 recipes/complete/gpt2_clm_trainer.py
    torchrun --nproc-per-node 2 recipes/complete/gpt2_clm_trainer.py --tune
    torchrun --nproc-per-node 2 recipes/complete/gpt2_clm_trainer.py --hook topk --density 0.05
    torchrun --nproc-per-node 2 recipes/complete/gpt2_clm_trainer.py --text novel.txt letters.txt
    torchrun --nproc-per-node 2 recipes/complete/gpt2_clm_trainer.py --model openai-community/gpt2 --lr 5e-5 \\
        --dataset Salesforce/wikitext --dataset-config wikitext-2-raw-v1

A new GPT-2 is small, and its tokenizer is trained on the spot; the text is Python's own documentation unless you bring
yours. Each rank uses a GPU if there are any.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `recipes`, when this file runs as a script

from ddp_hooks import BucketTuner, DearConfig, TopKConfig
from recipes.common.record import Record
from recipes.common.texts import read_texts
from recipes.complete.trainer_base import (
    HookTrainer,
    Task,
    finish,
    make_model,
    make_parser,
    parse,
    prepare_text,
    training_arguments,
)


def main(argv: Sequence[str] | None = None) -> Record:
    args = parse_arguments(argv)
    texts = read_texts(args)  # before ranks wait for each other: what fails here fails on all of them
    settings = training_arguments(args)
    task = make_task(args, texts)
    if args.tune:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("ddp_hooks").setLevel(logging.INFO)  # a line for every trial, on the first rank
    trainer = HookTrainer(args=settings, comm_hook=hook_of(args), **task.for_trainer())
    trainer.train()
    return finish(trainer, task, "gpt2_clm_trainer", f"{args.hook}-tuned" if args.tune else args.hook, argv)


def hook_of(args: argparse.Namespace) -> DearConfig | TopKConfig | None:
    """Return the configuration of ``--hook`` and ``--tune``."""
    if args.hook == "none":
        return None
    tuner = None
    if args.tune:
        # Shorter trials than usual, for a short run, and sizes for a small model. Without a profile every run searches;
        # with the usual one the next run begins with what this one has found.
        tuner = BucketTuner(low_mb=1.0, high_mb=32.0, start_mb=4.0, max_trials=5, steps_per_trial=6, profile=None)
    if args.hook == "dear":
        return DearConfig(tuner=tuner)
    return TopKConfig(density=args.density, warmup_steps=args.steps // 4, tuner=tuner)


def make_task(args: argparse.Namespace, texts: list[str]) -> Task:
    """Return the task of predicting each token from earlier tokens."""
    text = prepare_text(args, texts, marked=False)
    config = GPT2Config(
        vocab_size=len(text.tokenizer),
        n_positions=args.block_length,
        n_embd=args.hidden_size,
        n_layer=args.layers,
        n_head=args.heads,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = make_model(args, AutoModelForCausalLM, config)
    return Task(model, text.training, text.held_out, own_labels, text.data)


def own_labels(blocks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch in which every token is to be predicted."""
    ids = torch.stack([block["input_ids"] for block in blocks])
    return {"input_ids": ids, "labels": ids}


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("Train a GPT-2 with the Hugging Face Trainer.", hooks=["dear", "topk", "none"])
    parser.add_argument("--tune", action="store_true", help="search for the size of groups while training runs")
    parser.add_argument("--density", type=float, default=0.05, help="part of the gradient that is sent, with topk")
    args = parse(parser, argv)
    if args.tune and args.hook == "none":
        parser.error("--tune searches for the size of a hook's groups: give --hook dear or topk")
    return args


if __name__ == "__main__":
    main()
