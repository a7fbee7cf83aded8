"""Train a T5 to translate with the Hugging Face Trainer, its table of words sharded over the ranks (EmbRace).

    torchrun --nproc-per-node 2 recipes/complete/t5_translation.py
    torchrun --nproc-per-node 2 recipes/complete/t5_translation.py --hook tables
    torchrun --nproc-per-node 2 recipes/complete/t5_translation.py --model google-t5/t5-small --lr 3e-4 \\
        --dataset wmt/wmt16 --dataset-config de-en --split "train[:100000]" --source en --target de

``--hook dear+tables`` sends all other layers by DeAR, ``tables`` by DDP's all-reduce, and with ``none`` everything goes
by all-reduce. Encoder and decoder share one table of words. Without ``--dataset`` the text is made on the spot:
sentences of Python's documentation, and as their translation their Pig Latin, which is a cipher and no language
(``recipes/common/pig_latin.py``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    EvalPrediction,
    PreTrainedTokenizerBase,
    T5Config,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `recipes`, when this file runs as a script

from ddp_hooks import DearConfig
from ddp_hooks.integrations import Tables
from ddp_hooks.integrations.settings import Config
from recipes.common.pig_latin import pig_latin_corpus
from recipes.common.record import Record
from recipes.common.texts import read_dataset
from recipes.common.tokens import shared_tokenizer
from recipes.complete.trainer_base import (
    HookTrainer,
    Task,
    finish,
    from_hub,
    make_model,
    make_parser,
    parse,
    training_arguments,
)

TABLE = "shared"  # what T5 calls the embedding of encoder and decoder


def main(argv: Sequence[str] | None = None) -> Record:
    args = parse_arguments(argv)
    pairs = read_pairs(args)  # before ranks wait for each other: what fails here fails on all of them
    settings = training_arguments(args)
    task = make_task(args, pairs)
    trainer = HookTrainer(args=settings, comm_hook=hook_of(args), **task.for_trainer())
    trainer.train()
    return finish(trainer, task, "t5_translation", args.hook, argv)


def hook_of(args: argparse.Namespace) -> Config | None:
    """Return the configuration of ``--hook``."""
    # The table has an optimizer of its own, SparseAdam unless another one is named, and the Trainer's learning rate.
    tables = Tables(ids=looked_up, modules=TABLE)
    hooks: dict[str, Config | None] = {"none": None, "tables": tables, "dear+tables": [DearConfig(), tables]}
    return hooks[args.hook]


def looked_up(batch: dict[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return all ids that a batch looks up, in the encoder and in the decoder."""
    return {TABLE: [batch["input_ids"], batch["decoder_input_ids"]]}


# What is learned ----------------------------------------------------------------------------------------


class Pairs(Dataset[dict[str, list[int]]]):
    """Sentences and their translations, as ids.

    Args:
        sources, targets: ids of each.
    """

    def __init__(self, sources: list[list[int]], targets: list[list[int]]) -> None:
        self.sources = sources
        self.targets = targets

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"input_ids": self.sources[index], "labels": self.targets[index]}


def make_task(args: argparse.Namespace, pairs: list[tuple[str, str]]) -> Task:
    """Return the task of translating a sentence."""
    tokenizer = make_tokenizer(args, pairs)
    training, held_out = hold_out_pairs(pairs)
    model = make_model(args, AutoModelForSeq2SeqLM, t5_config(args, tokenizer))
    give_output_layer_its_own_weight(model)
    data = f"{source_of(args)}: {len(training):,} pairs of sentences, {len(held_out):,} held out"
    return Task(
        model,
        encode(training, tokenizer, args.block_length),
        encode(held_out, tokenizer, args.block_length),
        DataCollatorForSeq2Seq(tokenizer, model=model),  # the model shifts labels to get the decoder's ids
        f"{data}, {len(tokenizer):,} tokens",
        {"compute_metrics": token_accuracy, "preprocess_logits_for_metrics": most_likely},
    )


def t5_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> T5Config:
    """Return the configuration of a new model."""
    settings: dict[str, Any] = {"decoder_start_token_id": tokenizer.pad_token_id}  # as T5 has it
    return T5Config(
        vocab_size=len(tokenizer),
        d_model=args.hidden_size,
        d_kv=args.hidden_size // args.heads,
        d_ff=4 * args.hidden_size,
        num_layers=args.layers,
        num_heads=args.heads,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **settings,
    )


def give_output_layer_its_own_weight(model: nn.Module) -> None:
    """Give the output layer of a T5 a weight of its own, with the values of the table of words.

    It reads all rows in every step, so a table that is sharded cannot be shared with it. ``TableConfig(untie=True)``
    would do the same; here it is done with every hook, so that all of them train the same model.
    """
    output: Any = model.get_output_embeddings()  # type: ignore[operator]
    output.weight = nn.Parameter(output.weight.detach().clone())


def make_tokenizer(args: argparse.Namespace, pairs: list[tuple[str, str]]) -> PreTrainedTokenizerBase:
    """Return one tokenizer for both languages."""
    if args.model is not None:
        tokenizer: PreTrainedTokenizerBase = from_hub(AutoTokenizer, args.model)
        return tokenizer
    texts = [text for pair in pairs for text in pair]
    return shared_tokenizer(texts, args.vocab_size, eos_token="[SEP]")


def encode(pairs: list[tuple[str, str]], tokenizer: PreTrainedTokenizerBase, max_length: int) -> Pairs:
    """Return ids of sentences, each cut to the length and ended by its token."""

    def ids_of(texts: list[str]) -> list[list[int]]:
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
        return [[*ids[: max_length - 1], tokenizer.eos_token_id] for ids in encoded]

    return Pairs(ids_of([source for source, _ in pairs]), ids_of([target for _, target in pairs]))


def hold_out_pairs(pairs: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return pairs to train on, and every twentieth pair for validation."""
    return [pair for index, pair in enumerate(pairs) if index % 20], pairs[::20]


# How well it is learned ---------------------------------------------------------------------------------


def most_likely(logits: Tensor | tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Return ids in place of logits, all of which the Trainer would keep."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)


def token_accuracy(found: EvalPrediction) -> dict[str, float]:
    """Return the part of the tokens that are predicted right from the right tokens before them."""
    labels = np.asarray(found.label_ids)
    counts = labels != -100
    return {"token_accuracy": float((np.asarray(found.predictions) == labels)[counts].mean())}


# Text ---------------------------------------------------------------------------------------------------


def read_pairs(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return sentences and their translations, as the command line asks."""
    if args.dataset is None:
        return pig_latin_corpus()
    rows: list[Any] = read_dataset(args.dataset, args.dataset_config, args.split, args.text_column)
    missing = {args.source, args.target} - set(rows[0])
    if missing:
        raise SystemExit(
            f"error: the dataset {args.dataset!r} has the languages {', '.join(rows[0])}, but not "
            f"{', '.join(sorted(missing))}: name two of them with --source and --target"
        )
    return [(row[args.source], row[args.target]) for row in rows]


def source_of(args: argparse.Namespace) -> str:
    """Return the source of the pairs, in words."""
    if args.dataset is None:
        return "Python's documentation and its Pig Latin"
    return f"{args.dataset}, {args.source} to {args.target}"


# Command line -------------------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser(
        "Train a T5 to translate with the Hugging Face Trainer.",
        hooks=["dear+tables", "tables", "none"],
        steps=150,
        batch_size=16,
        lr=3e-3,
        vocab_size=8192,
        hidden_size=128,
        layers=2,
        text_column="translation",
    )
    parser.add_argument("--source", default="en", metavar="LANGUAGE", help="of the dataset, to translate from")
    parser.add_argument("--target", default="de", metavar="LANGUAGE", help="of the dataset, to translate to")
    args = parse(parser, argv)
    if args.text:
        parser.error("--text has no translations: give a --dataset with pairs of sentences")
    return args


if __name__ == "__main__":
    main()
