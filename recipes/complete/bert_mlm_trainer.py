"""Train a BERT as a masked language model with the Hugging Face Trainer, with plain DDP, DeAR or SparDL.

    torchrun --nproc-per-node 2 recipes/complete/bert_mlm_trainer.py
    torchrun --nproc-per-node 2 recipes/complete/bert_mlm_trainer.py --hook spardl --density 0.05
    torchrun --nproc-per-node 2 recipes/complete/bert_mlm_trainer.py --text novel.txt letters.txt
    torchrun --nproc-per-node 2 recipes/complete/bert_mlm_trainer.py --model google-bert/bert-base-uncased --lr 5e-5 \\
        --dataset Salesforce/wikitext --dataset-config wikitext-2-raw-v1

The model and its tokens are those of ``bert_mlm.py``, which has a loop of its own; here the loop is the Trainer's, with
its clipping, schedule and evaluation. Tokens of held-out text are hidden once: every run fills in the same ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerBase,
    default_data_collator,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `recipes`, when this file runs as a script

from ddp_hooks import DearConfig, TopKConfig
from recipes.common.record import Record
from recipes.common.texts import read_texts
from recipes.complete.bert_mlm import bert_config
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
    task = make_task(args, texts, settings.process_index)
    trainer = HookTrainer(args=settings, comm_hook=hook_of(args), **task.for_trainer())
    trainer.train()
    return finish(trainer, task, "bert_mlm_trainer", args.hook, argv)


def hook_of(args: argparse.Namespace) -> DearConfig | TopKConfig | None:
    """Return the configuration of ``--hook``."""
    if args.hook == "none":
        return None
    if args.hook == "dear":
        return DearConfig()
    # Biases and LayerNorm weights are few, and matter: they are summed up in full.
    return TopKConfig(density=args.density, warmup_steps=args.steps // 4, dense_below_numel=1024)


def make_task(args: argparse.Namespace, texts: list[str], rank: int) -> Task:
    """Return the task of filling in hidden tokens."""
    text = prepare_text(args, texts, marked=True)
    model = make_model(args, AutoModelForMaskedLM, bert_config(args, text.tokenizer))
    held_out = hide_once(text.held_out, hiding_of(text.tokenizer, seed=0))
    hide_anew = hiding_of(text.tokenizer, args.seed + rank)
    return Task(model, text.training, held_out, Collate(hide_anew), text.data)


# Hidden tokens ------------------------------------------------------------------------------------------


class Collate:
    """Make a batch of blocks; hide tokens unless some are hidden already.

    Args:
        hide: collates blocks, and hides some tokens.
    """

    def __init__(self, hide: DataCollatorForLanguageModeling) -> None:
        self.hide = hide

    def __call__(self, blocks: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = default_data_collator(blocks) if "labels" in blocks[0] else self.hide(blocks)
        return batch


class HiddenOnce(Dataset[dict[str, Tensor]]):
    """Blocks some of whose tokens are hidden already.

    Args:
        batch: all of them.
    """

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: self.batch[name][index] for name in ("input_ids", "labels")}


def hide_once(blocks: Dataset[dict[str, Tensor]], hide: DataCollatorForLanguageModeling) -> HiddenOnce:
    """Hide the same tokens whenever a block is read."""
    number: int = len(blocks)  # type: ignore[arg-type]
    return HiddenOnce(hide([blocks[index] for index in range(number)]))


def hiding_of(tokenizer: PreTrainedTokenizerBase, seed: int) -> DataCollatorForLanguageModeling:
    """Return a collator that hides 15 % of the tokens, drawn by this seed."""
    hide = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    hide.generator = torch.Generator().manual_seed(seed)  # its own `seed` refuses child processes
    return hide


# Command line -------------------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("Train a BERT with the Hugging Face Trainer.", hooks=["dear", "spardl", "none"])
    parser.add_argument("--density", type=float, default=0.05, help="part of the gradient that is sent, with spardl")
    return parse(parser, argv)


if __name__ == "__main__":
    main()
