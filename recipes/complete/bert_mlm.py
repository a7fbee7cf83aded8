"""Train a BERT as a masked language model, with plain DDP or with DeAR.

A tokenizer is trained on the spot and a small BERT learns to fill in the words that were hidden from it.
The text is Python's own documentation unless you bring yours::

    torchrun --nproc-per-node 2 recipes/complete/bert_mlm.py --hook dear
    torchrun --nproc-per-node 2 recipes/complete/bert_mlm.py --hook dear --text novel.txt letters.txt
    python recipes/complete/bert_mlm.py --dataset Salesforce/wikitext --dataset-config wikitext-2-raw-v1
    python -m recipes.cluster --workers 3 --rate 500mbit -- python recipes/complete/bert_mlm.py --hook dear --steps 50

Started without a launcher it trains in one process. Everything random is seeded per rank, so ``--hook none``
and ``--hook dear`` see the same data, masks and dropout, and their final losses agree to rounding.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `recipes`, when this file runs as a script

from ddp_hooks import DearState, DearStats, dear_hook
from recipes.common.batches import endless
from recipes.common.processes import clock_s, mean_over_ranks, pick_device, process_group
from recipes.common.texts import add_text_arguments, positive, read_texts
from recipes.common.tokens import Blocks, check_same_on_all_ranks, cut_into_blocks, shared_tokenizer

UNTIMED_STEPS = 5  # allocators, caches and DDP's bucket rebuild settle in the first steps


@dataclass(frozen=True)
class Result:
    """Measurements of one run; all but ``stats`` are the same on every rank."""

    num_parameters: int
    num_blocks: int
    final_loss: float  # of the last step, mean over ranks
    step_s: float  # mean over the steps after the first UNTIMED_STEPS
    stats: DearStats | None  # of this rank's last step, with --hook dear


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    texts = read_texts(args)  # before ranks wait for each other: what fails here fails on all of them
    device = pick_device(args.device)
    with process_group(device):
        result = train(args, texts, device)
        if dist.get_rank() == 0:
            report(args, result)


def train(args: argparse.Namespace, texts: list[str], device: torch.device) -> Result:
    """Train; the loop is the same for both hooks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    tokenizer = shared_tokenizer(texts, args.vocab_size)
    blocks = cut_into_blocks(texts, tokenizer, args.block_length)
    check_same_on_all_ranks(blocks)
    batches = endless(make_loader(blocks, tokenizer, args.batch_size, args.seed, rank, world_size))

    torch.manual_seed(args.seed)  # every rank draws the same initial weights
    model: nn.Module = BertForMaskedLM(bert_config(args, tokenizer))
    model.to(device)
    bucket_cap_mb = 5 if args.hook == "dear" else None  # DeAR likes smaller buckets than DDP does
    ddp = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay=0.01), lr=args.lr)
    state = None
    if args.hook == "dear":
        state = DearState(ddp, optimizer)
        ddp.register_comm_hook(state, dear_hook)
    scheduler = get_linear_schedule_with_warmup(optimizer, max(1, args.steps // 10), args.steps)

    torch.manual_seed(args.seed + rank)  # every rank drops different activations, the same in every run
    timed_from = min(UNTIMED_STEPS, args.steps - 1)
    ddp.train()
    for step, batch in enumerate(itertools.islice(batches, args.steps)):
        if step == timed_from:
            started_s = clock_s(device)
        optimizer.zero_grad()
        loss = ddp(**{name: values.to(device) for name, values in batch.items()}).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0 and (step + 1) % args.log_every == 0:
            print(f"step {step + 1:5d}   loss on rank 0 {loss.item():.4f}", flush=True)
    step_s = (clock_s(device) - started_s) / (args.steps - timed_from)

    stats = None
    if state is not None:
        stats = state.stats()
        state.close()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Result(num_parameters, len(blocks), mean_over_ranks(loss), step_s, stats)


# Batches ------------------------------------------------------------------------------------------------


def make_loader(
    blocks: Tensor, tokenizer: PreTrainedTokenizerFast, batch_size: int, seed: int, rank: int, world_size: int
) -> DataLoader[dict[str, Tensor]]:
    """Return this rank's share of the blocks, shuffled; 15 % of the tokens are hidden anew at every visit."""
    if len(blocks) < batch_size * world_size:
        raise ValueError(
            f"expected at least batch size * ranks = {batch_size} * {world_size} blocks of text, "
            f"found {len(blocks)}; give more text or a smaller --batch-size or --block-length"
        )
    dataset = Blocks(blocks)
    sampler: DistributedSampler[dict[str, Tensor]] = DistributedSampler(dataset, world_size, rank, seed=seed)
    hide_tokens = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    hide_tokens.generator = torch.Generator().manual_seed(seed + rank)  # its own `seed` refuses child processes
    return DataLoader(dataset, batch_size, sampler=sampler, collate_fn=hide_tokens, drop_last=True)


# Model --------------------------------------------------------------------------------------------------


def bert_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> BertConfig:
    return BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=args.block_length,
        pad_token_id=tokenizer.pad_token_id,
    )


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return groups for the optimizer: matrices decay; biases and LayerNorm weights do not."""
    parameters = list(model.parameters())  # the output layer shares the embedding's weight: listed once
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


# Command line -------------------------------------------------------------------------------------------


def report(args: argparse.Namespace, result: Result) -> None:
    table = Table(title="BERT as a masked language model", show_header=False, box=None)
    table.add_row("hook", args.hook)
    table.add_row("ranks", f"{dist.get_world_size()} on {args.device}")
    table.add_row("parameters", f"{result.num_parameters:,}")
    table.add_row("text", f"{result.num_blocks:,} blocks of {args.block_length} tokens")
    table.add_row("final loss", repr(result.final_loss))
    table.add_row("seconds per step", f"{result.step_s:.3f}")
    if result.stats is not None:
        stats = result.stats
        sent_mb, received_mb = stats.sent_bytes / 1e6, stats.received_bytes / 1e6
        table.add_section()
        table.add_row("last step sent, received", f"{sent_mb:.2f} MB, {received_mb:.2f} MB")
        table.add_row("in fusion groups, lanes", f"{stats.num_groups}, {stats.num_lanes}")
        if stats.overlap is not None:
            table.add_row("communicating for", f"{stats.comm_s:.3f} s, {stats.overlap:.0%} of it hidden")
        table.add_row("waiting in step", f"{stats.step_stall_s:.3f} s")
        table.add_row("waiting in forward", f"{stats.forward_stall_s:.3f} s")
    Console().print(table)


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a BERT as a masked language model, with plain DDP or with DeAR.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--hook", choices=["none", "dear"], default="none", help="plain DDP or DeAR")
    parser.add_argument("--steps", type=positive, default=100)
    parser.add_argument("--batch-size", type=positive, default=8, help="blocks per rank and step")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate after warm-up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=positive, default=10, metavar="STEPS")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: a GPU per rank")

    add_text_arguments(parser)
    model = parser.add_argument_group("model")
    model.add_argument("--vocab-size", type=positive, default=4000, help="tokens, at most")
    model.add_argument("--block-length", type=positive, default=64, help="tokens per example")
    model.add_argument("--hidden-size", type=positive, default=256)
    model.add_argument("--layers", type=positive, default=4)
    model.add_argument("--heads", type=positive, default=4)

    args = parser.parse_args(argv)
    if args.hidden_size % args.heads != 0:
        parser.error(f"--hidden-size must be a multiple of --heads, got {args.hidden_size} and {args.heads}")
    if args.block_length < 3:
        parser.error(f"--block-length must be at least 3 ([CLS], a token, [SEP]), got {args.block_length}")
    return args


if __name__ == "__main__":
    main()
