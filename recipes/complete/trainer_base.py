"""Parts that recipes for the Hugging Face Trainer share; each adds a model, its batches, and its hooks.

A recipe is these lines, with functions of its own in place of ``make_task`` and ``hook_of``::

    args = parse(make_parser("What it does.", hooks=["none", "dear"]), argv)
    texts = read_texts(args)  # before ranks wait for each other: what fails here fails on all of them
    settings = training_arguments(args)  # joins the ranks that torchrun started
    task = make_task(args, texts)
    trainer = HookTrainer(args=settings, comm_hook=hook_of(args), **task.for_trainer())
    trainer.train()
    finish(trainer, task, "my_recipe", args.hook, argv)

``comm_hook`` is all that training with a hook takes; the rest of this module would be the same without.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import (
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    set_seed,
)

from ddp_hooks.integrations.settings import Config, combination_of
from ddp_hooks.integrations.transformers import CommHookMixin
from recipes.common.record import Record, all_reduce_mb, command_of, describe, mean_stats, now, report, surroundings
from recipes.common.texts import add_text_arguments, positive
from recipes.common.tokens import Blocks, check_same_on_all_ranks, cut_into_blocks, hold_out, shared_tokenizer

_NO_MEASURES = ("runtime", "per_second", "preparation_time")  # the Trainer's own clocks


@dataclass(frozen=True)
class Task:
    """Model, data and batches of a recipe.

    Args:
        model: to train.
        training, held_out: examples.
        collate: makes a batch of some of them.
        data: where they come from and how many they are, in words.
        more: further arguments of the Trainer, such as ``compute_metrics``.
    """

    model: nn.Module
    training: Dataset[Any]
    held_out: Dataset[Any]
    collate: Callable[[list[Any]], Any]
    data: str
    more: dict[str, Any] = field(default_factory=dict)
    about: str = field(init=False)  # the model, before tables are cut out of it

    def __post_init__(self) -> None:
        object.__setattr__(self, "about", describe(self.model))

    def for_trainer(self) -> dict[str, Any]:
        """Return arguments of a Trainer."""
        return {
            "model": self.model,
            "train_dataset": self.training,
            "eval_dataset": self.held_out,
            "data_collator": self.collate,
            **self.more,
        }


class HookTrainer(CommHookMixin, Trainer):
    """A Trainer that takes ``comm_hook``, and prints a line for every loss in place of its dictionaries."""

    def __init__(self, *args: Any, comm_hook: Config | None = None, **kwargs: Any) -> None:
        self.comm_hook = comm_hook
        super().__init__(*args, comm_hook=comm_hook, **kwargs)
        self.remove_callback(PrinterCallback)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Print losses. A callback could print as well, but might read parameters, so DeAR would wait for them."""
        if "loss" in logs and self.is_world_process_zero():
            print(f"step {self.state.global_step:5d}   loss {logs['loss']:.4f}", flush=True)
        super().log(logs, *args, **kwargs)


# After training -----------------------------------------------------------------------------------------


def finish(trainer: HookTrainer, task: Task, recipe: str, hook: str, argv: Sequence[str] | None) -> Record:
    """Measure on held-out data, report on the first rank, and end the process group.

    Args:
        trainer: that has trained.
        task: what it has learned.
        recipe: the name of its file, without ``.py``.
        hook: its name in tables.
        argv: as ``main`` had it.
    """
    measured = trainer.evaluate()
    settings, history = trainer.args, trainer.state.log_history
    sent_mb, stall_s = mean_stats(history)
    if trainer.comm_hook is None or combination_of(trainer.comm_hook).dense is None:  # DDP's own all-reduce
        sent_mb = (sent_mb or 0.0) + all_reduce_mb(task.model.parameters(), settings.world_size)
    record = Record(
        recipe=recipe,
        hook=hook,
        command=command_of(recipe, argv),
        created=now(),
        environment=surroundings(),
        data=task.data,
        num_workers=settings.world_size,
        steps=trainer.state.global_step,
        losses=[[entry["step"], entry["loss"]] for entry in history if "loss" in entry],
        held_out=measures_of(measured),
        sent_mb_per_step=sent_mb,
        stall_s_per_step=stall_s,
        model=task.about,
    )
    if trainer.is_world_process_zero():
        assert settings.output_dir is not None
        report(record, Path(settings.output_dir))
    trainer.accelerator.end_training()
    return record


def measures_of(evaluated: Mapping[str, float]) -> dict[str, float]:
    """Return the measures of quality among the results of ``Trainer.evaluate``."""
    return {
        name.removeprefix("eval_").replace("_", " "): value
        for name, value in evaluated.items()
        if name.startswith("eval_") and not name.endswith(_NO_MEASURES)
    }


# Before training ----------------------------------------------------------------------------------------


def training_arguments(args: argparse.Namespace) -> TrainingArguments:
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
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_drop_last=True,
        # True multiplies the loss by the number of ranks, and relies on the model to divide by the tokens of all ranks.
        # BERT and T5 take a mean, whatever they are told.
        average_tokens_across_devices=False,
        dataloader_pin_memory=not on_cpu,
        use_cpu=on_cpu,
        ddp_backend="gloo" if on_cpu and "RANK" in os.environ else None,  # one process alone has no group
        ddp_find_unused_parameters=False,  # these models use all of theirs; plain DDP would look for them
    )
    _ = settings.device  # where transformers makes it
    return settings


@dataclass(frozen=True)
class Text:
    """Blocks of tokens, (num_blocks, block_length), and their tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    training: Blocks
    held_out: Blocks
    data: str


def prepare_text(args: argparse.Namespace, texts: list[str], marked: bool) -> Text:
    """Return tokens of the texts, the same on every rank, with every tenth block held out.

    Args:
        args: of the command line.
        texts: that it asks for.
        marked: see :func:`~recipes.common.tokens.cut_into_blocks`.
    """
    if args.model is None:
        tokenizer: PreTrainedTokenizerBase = shared_tokenizer(texts, args.vocab_size)
    else:
        tokenizer = from_hub(AutoTokenizer, args.model)
    blocks = cut_into_blocks(texts, tokenizer, args.block_length, marked)
    check_same_on_all_ranks(blocks)
    training, held_out = hold_out(blocks)
    data = f"{source_of(args)}: {len(training):,} blocks of {args.block_length} tokens, {len(held_out):,} held out"
    return Text(tokenizer, Blocks(training), Blocks(held_out), data)


def source_of(args: argparse.Namespace) -> str:
    """Return the source of the text, in words."""
    if args.text:
        return f"{len(args.text)} files"
    return str(args.dataset or "Python's documentation")


def make_model(args: argparse.Namespace, auto_class: Any, config: PretrainedConfig) -> Any:
    """Return the model that the command line names, or a new one of this configuration; the same on every rank."""
    set_seed(args.seed)
    return auto_class.from_config(config) if args.model is None else from_hub(auto_class, args.model)


def from_hub(auto_class: Any, name: str) -> Any:
    """Load a model or a tokenizer of the hub, or of a folder; exit with a message if that fails."""
    try:
        return auto_class.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"error: cannot load {name!r} with {auto_class.__name__}: {error}\n"
            "--model expects a name on the Hugging Face hub, which takes internet access on first use, or a folder"
        ) from error


# Command line -------------------------------------------------------------------------------------------


def make_parser(description: str, hooks: Sequence[str], **defaults: Any) -> argparse.ArgumentParser:
    """Return a parser with the options of all these recipes.

    Args:
        description: what the recipe does.
        hooks: choices of ``--hook``, the default first.
        defaults: of options, by name.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--hook", choices=hooks, default=hooks[0], help="how gradients travel; none: as without hooks")
    parser.add_argument("--steps", type=positive, default=100, help="of the optimizer")
    parser.add_argument("--batch-size", type=positive, default=8, help="examples per rank and step")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate after warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=positive, default=5, metavar="STEPS")
    parser.add_argument("--output", type=Path, default=Path("build/recipes"), metavar="FOLDER", help="for results")
    add_text_arguments(parser)
    model = parser.add_argument_group("model")
    model.add_argument("--model", metavar="NAME", help="of the Hugging Face hub, or a folder, instead of a new one")
    model.add_argument("--vocab-size", type=positive, default=4000, help="tokens of a new tokenizer, at most")
    model.add_argument("--block-length", type=positive, default=64, help="tokens per example, at most")
    model.add_argument("--hidden-size", type=positive, default=256, help="of a new model; a multiple of --heads")
    model.add_argument("--layers", type=positive, default=4, help="of a new model")
    model.add_argument("--heads", type=positive, default=4, help="of a new model")
    parser.set_defaults(**defaults)
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line, and refuse options that cannot work."""
    args = parser.parse_args(argv)
    if args.hidden_size % args.heads != 0:
        parser.error(f"--hidden-size must be a multiple of --heads, got {args.hidden_size} and {args.heads}")
    if args.block_length < 3:
        parser.error(f"--block-length must be at least 3, got {args.block_length}")
    density = getattr(args, "density", None)
    if density is not None and not 0 < density <= 1:
        parser.error(f"--density must be in (0, 1], got {density}")
    return args
