"""Train a BERT as a masked language model, with plain DDP or with DeAR.

A tokenizer is trained on the spot and a small BERT learns to fill in the words that were hidden from it.
The text is Python's own documentation unless you bring yours::

    torchrun --nproc-per-node 2 recipes/bert_mlm.py --hook dear
    torchrun --nproc-per-node 2 recipes/bert_mlm.py --hook dear --text novel.txt letters.txt
    python recipes/bert_mlm.py --dataset Salesforce/wikitext --dataset-config wikitext-2-raw-v1
    python -m recipes.cluster --workers 3 --rate 500mbit -- python recipes/bert_mlm.py --hook dear --steps 50

Started without a launcher it trains in one process. Everything random is seeded per rank, so ``--hook none``
and ``--hook dear`` see the same data, masks and dropout, and their final losses agree to rounding.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    get_linear_schedule_with_warmup,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `recipes`, when this file runs as a script

from ddp_hooks import DearState, DearStats, dear_hook
from recipes.texts import add_text_arguments, positive, read_texts

SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
UNTIMED_STEPS = 5  # allocators, caches and DDP's bucket rebuild settle in the first steps


@dataclass(frozen=True)
class Result:
    """What one run measured, the same on every rank but for ``stats``."""

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
    """The training loop; it is the same for both hooks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    tokenizer = shared_tokenizer(texts, args.vocab_size)
    blocks = cut_into_blocks(texts, tokenizer, args.block_length)
    check_same_on_all_ranks(blocks)
    batches = endless_batches(make_loader(blocks, tokenizer, args.batch_size, args.seed, rank, world_size))

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


# Tokens -------------------------------------------------------------------------------------------------


def shared_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer on rank 0 and give every rank the same one."""
    message: list[Any] = [train_tokenizer(texts, vocab_size).to_str() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(message, src=0)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(message[0]), **SPECIAL_TOKENS)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A lower-case WordPiece tokenizer of at most ``vocab_size`` tokens; the same texts give the same one."""
    tokenizer = word_piece(vocab={})
    # The trainer numbers the pieces "##a", "##b", … in the order of a randomly seeded hash map and breaks
    # ties by number, so that no two runs would agree. Naming them first fixes their numbers.
    normalize = tokenizer.normalizer.normalize_str
    characters = sorted({character for text in texts for character in normalize(text)})
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*SPECIAL_TOKENS.values(), *(f"##{character}" for character in characters)],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # A fresh tokenizer, in which the pieces are ordinary tokens again.
    return word_piece(tokenizer.get_vocab())


def word_piece(vocab: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=SPECIAL_TOKENS["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def cut_into_blocks(texts: list[str], tokenizer: PreTrainedTokenizerFast, block_length: int) -> Tensor:
    """All texts as one stream, cut into ``[CLS] … [SEP]`` blocks: (num_blocks, block_length), int64.

    What is left at the end and does not fill a block is dropped, so no block needs padding.
    """
    documents = tokenizer(texts, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    stream = torch.tensor(list(itertools.chain.from_iterable(documents)), dtype=torch.int64)
    rows = stream[: len(stream) - len(stream) % (block_length - 2)].view(-1, block_length - 2)
    cls = torch.full((len(rows), 1), tokenizer.cls_token_id)
    sep = torch.full((len(rows), 1), tokenizer.sep_token_id)
    return torch.cat([cls, rows, sep], dim=1)


def check_same_on_all_ranks(blocks: Tensor) -> None:
    """Raise everywhere if ranks read different text, as they might on machines with different files."""
    fingerprint = f"{len(blocks)} blocks with hash {hashlib.sha256(blocks.numpy().tobytes()).hexdigest()[:8]}"
    fingerprints: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(fingerprints, fingerprint)
    if len(set(fingerprints)) > 1:
        found = ", ".join(f"{text} on rank {rank}" for rank, text in enumerate(fingerprints))
        raise ValueError(
            f"expected the same text on every rank, found {found}; read the same files with the same Python "
            "on every machine"
        )


# Batches ------------------------------------------------------------------------------------------------


class Blocks(Dataset[dict[str, Tensor]]):
    """Blocks of text in the form that the collator of transformers expects."""

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks  # (num_blocks, block_length), int64

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.blocks[index]}


def make_loader(
    blocks: Tensor, tokenizer: PreTrainedTokenizerFast, batch_size: int, seed: int, rank: int, world_size: int
) -> DataLoader[dict[str, Tensor]]:
    """This rank's share of the blocks, shuffled, with 15 % of the tokens hidden anew at every visit."""
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


def endless_batches(loader: DataLoader[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Batches without end, in another order in every epoch."""
    assert isinstance(loader.sampler, DistributedSampler)
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        yield from loader


# Model --------------------------------------------------------------------------------------------------


def bert_config(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> BertConfig:
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
    """Matrices decay; biases and LayerNorm weights, which have one dimension, do not."""
    parameters = list(model.parameters())  # the output layer shares the embedding's weight: listed once
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


# Processes and devices ----------------------------------------------------------------------------------


def pick_device(kind: str) -> torch.device:
    """The CPU, or the GPU that belongs to this local rank."""
    if kind == "cpu":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise SystemExit(
            f"error: --device cuda expects a GPU for every rank of a machine, found {torch.cuda.device_count()} "
            f"for local rank {local_rank}; start fewer ranks or use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(device: torch.device) -> Iterator[None]:
    """Join the ranks that the launcher started; without a launcher, be the only one."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        gc.collect()  # a model in reference cycles would keep its group alive, and with it threads that torch ends
        dist.destroy_process_group()


def mean_over_ranks(value: Tensor) -> float:
    total = value.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def clock_s(device: torch.device) -> float:
    """Seconds on a monotonic clock, once the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


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
