"""Train a language model whose table of words is split over the ranks (EmbRace); DeAR carries the other layers.

    torchrun --nproc-per-node 2 recipes/tables_ddp.py
    torchrun --nproc-per-node 2 recipes/tables_ddp.py --text novel.txt letters.txt --vocabulary 20000
    torchrun --nproc-per-node 2 recipes/tables_ddp.py --dataset Salesforce/wikitext --dataset-config wikitext-2-raw-v1

The text is Python's own documentation unless you bring yours. Only rows of words in a batch travel, and rows that no
rank looks up in the next batch travel while the model computes.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset
from tqdm import tqdm

from ddp_hooks import DearState, dear_hook, shard_embeddings
from recipes.common.batches import endless_batches
from recipes.common.processes import log_loss, pick_device, process_group
from recipes.common.texts import add_text_arguments, positive, read_texts
from recipes.common.tokens import check_same_on_all_ranks
from recipes.common.words import cut_into_blocks, make_vocabulary, split_words


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    texts = read_texts(args)  # before ranks wait for each other: what fails here fails on all of them
    device = pick_device(args.device)
    with process_group(device):
        train(args, texts, device)


def train(args: argparse.Namespace, texts: list[str], device: torch.device) -> None:
    is_first = dist.get_rank() == 0
    words = [word for text in texts for word in split_words(text)]
    vocabulary = make_vocabulary(words, args.vocabulary)
    blocks = cut_into_blocks(words, vocabulary, args.sequence_length)
    check_same_on_all_ranks(blocks)

    torch.manual_seed(args.seed)  # every rank draws the same initial weights
    model = LanguageModel(len(vocabulary), args.width).to(device)
    # Before DDP and the optimizer. By name, because a table of less than 4096 rows stays whole otherwise.
    tables = shard_embeddings(model, modules="words", lr=args.lr)
    ddp = DistributedDataParallel(model, bucket_cap_mb=5, gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=args.lr)
    state = DearState(ddp, optimizer)  # tables step with this optimizer; without DeAR call tables.follow(optimizer)
    ddp.register_comm_hook(state, dear_hook)

    batches = itertools.islice(endless_batches(TensorDataset(blocks), args.batch_size), args.steps)
    loader = tables.prefetch(batches, lambda batch: {"words": batch[0][:, :-1]})  # reads one batch ahead
    prior = delayed = 0
    for step, (batch,) in enumerate(tqdm(loader, total=args.steps, disable=not is_first), start=1):
        inputs, targets = batch[:, :-1], batch[:, 1:].to(device)  # ids stay on the CPU
        optimizer.zero_grad()
        loss = F.cross_entropy(ddp(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        state.clip_grad_norm_(args.clip)  # by the norm over all ranks, tables included
        optimizer.step()
        prior, delayed = prior + tables.stats().num_prior_rows, delayed + tables.stats().num_delayed_rows
        if step % args.log_every == 0:
            log_loss(step, loss)

    if is_first:
        print(f"a step sent gradients of {(prior + delayed) / args.steps:,.0f} rows of {len(vocabulary):,}")
        print(f"{prior / args.steps:,.0f} of them before the next lookup, {delayed / args.steps:,.0f} after it")
    state.close()
    tables.close()


class LanguageModel(nn.Module):
    """An LSTM between a table of words and a linear layer.

    Args:
        num_words: rows of the table, and outputs.
        width: numbers per word, and size of the LSTM.
    """

    def __init__(self, num_words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(num_words, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.output = nn.Linear(width, num_words)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits of the next word, (batch, length, num_words), of ids (batch, length)."""
        states, _ = self.lstm(self.words(ids))
        logits: Tensor = self.output(states)
        return logits


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a language model with a sharded table and DeAR.")
    add = parser.add_argument
    add("--steps", type=positive, default=200)
    add("--batch-size", type=positive, default=16, help="blocks per rank and step")
    add("--lr", type=float, default=4e-3)
    add("--clip", type=float, default=1.0, help="largest norm of the gradient")
    add("--vocabulary", type=positive, default=10000, help="words, at most; other words are <unk>")
    add("--sequence-length", type=positive, default=32, help="words per block")
    add("--width", type=positive, default=128, help="numbers per word, and size of the LSTM")
    add("--log-every", type=positive, default=10, metavar="STEPS")
    add("--seed", type=int, default=0)
    add("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    add_text_arguments(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
