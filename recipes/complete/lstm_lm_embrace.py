"""Train a word-level LSTM language model with a sharded table (EmbRace), or with plain DDP and a sparse one.

    torchrun --nproc-per-node 2 recipes/complete/lstm_lm_embrace.py
    torchrun --nproc-per-node 2 recipes/complete/lstm_lm_embrace.py --tables ddp --optimizer adam
    torchrun --nproc-per-node 2 recipes/complete/lstm_lm_embrace.py --text novel.txt letters.txt --vocabulary 20000
    python recipes/complete/lstm_lm_embrace.py --dataset Salesforce/wikitext --dataset-config wikitext-2-raw-v1
    python -m recipes.cluster --workers 4 --rate 100mbit -- python recipes/complete/lstm_lm_embrace.py

The text is Python's own documentation unless you bring yours. Both kinds of table begin with the same weights and see
the same batches, so their losses agree step for step, to rounding; ``--output`` and ``--compare`` draw both in one
picture. Started without a launcher it trains in one process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # `recipes`, when this file runs as a script

from ddp_hooks import EmbeddingTables, TableStats, shard_embeddings
from recipes.common.batches import endless
from recipes.common.plain_ddp import all_reduce_apart
from recipes.common.processes import process_group
from recipes.common.texts import add_text_arguments, positive, read_texts
from recipes.common.tokens import check_same_on_all_ranks, hold_out
from recipes.common.words import cut_into_blocks, make_vocabulary, split_words

UNTIMED_STEPS = 5  # DDP rebuilds its buckets, and allocators settle
# Of the dense parameters, and of the table: its gradients are sparse.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], type[torch.optim.Optimizer]]] = {
    "sgd": (torch.optim.SGD, torch.optim.SGD),
    "adam": (torch.optim.Adam, torch.optim.SparseAdam),
}
LEARNING_RATES = {"sgd": 2.0, "adam": 4e-3}


@dataclass(frozen=True)
class Result:
    """Measurements of one run; all but ``stats`` are the same on every rank."""

    table_shape: tuple[int, int]  # words, numbers per word
    num_dense_parameters: int  # of everything else
    losses: list[float]  # of every step: nats per word, mean over ranks
    validation_loss: float  # likewise, on text that was held out
    words_per_s: float  # of all ranks together
    stats: list[TableStats]  # of this rank's steps; none with plain DDP


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_arguments(argv)
    texts = read_texts(args)  # before ranks wait for each other: what fails here fails on all of them
    with process_group(torch.device("cpu")):
        result = train(args, texts)
        if dist.get_rank() == 0:
            report(args, result)
            if args.output is not None:
                write(args, result)


def train(args: argparse.Namespace, texts: list[str]) -> Result:
    """Train; the loop is the same for both kinds of table."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    words = [word for text in texts for word in split_words(text)]
    vocabulary = make_vocabulary(words, args.vocabulary)
    blocks = cut_into_blocks(words, vocabulary, args.sequence_length)
    check_same_on_all_ranks(blocks)
    training, held_out = hold_out(blocks)
    loader = make_loader(training, args.batch_size, args.seed, rank, world_size)
    batches: Iterable[Sequence[Tensor]] = itertools.islice(endless(loader), args.steps)

    torch.manual_seed(args.seed)  # every rank draws the same initial weights
    model = LanguageModel(len(vocabulary), args.embedding, args.hidden)
    table_shape = len(vocabulary), args.embedding
    dense = [parameter for parameter in model.parameters() if parameter is not model.embedding.weight]
    dense_class, table_class = OPTIMIZERS[args.optimizer]
    optimizers = [dense_class(dense, lr=args.lr)]  # type: ignore[call-arg]
    tables: EmbeddingTables | None = None
    if args.tables == "embrace":
        # Named, because by default a table of less than 4096 rows stays whole.
        tables = shard_embeddings(model, modules="embedding", optimizer_class=table_class, lr=args.lr)
        tables.follow(optimizers[0])
        batches = tables.prefetch(batches, lambda batch: {"embedding": batch[0]})
    else:
        optimizers.append(table_class([model.embedding.weight], lr=args.lr))  # type: ignore[call-arg]
    ddp = DistributedDataParallel(model)
    if tables is None:
        ddp.register_comm_hook(dist.group.WORLD, all_reduce_apart)

    losses: list[Tensor] = []
    stats: list[TableStats] = []
    timed_from = min(UNTIMED_STEPS, args.steps - 1)
    for step, (inputs, targets) in enumerate(tqdm(batches, total=args.steps, disable=rank != 0)):
        if step == timed_from:
            started_s = time.perf_counter()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = ddp(inputs, targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.detach())
        if tables is not None:
            stats.append(tables.stats())
        if rank == 0 and (step + 1) % args.log_every == 0:
            tqdm.write(f"step {step + 1:5d}   perplexity on rank 0 {loss.exp().item():.1f}")
    step_s = (time.perf_counter() - started_s) / (args.steps - timed_from)

    if tables is None:
        validation_loss = evaluate(model, held_out, args.batch_size)
    else:
        with tables.local():  # whole again on every rank
            validation_loss = evaluate(model, held_out, args.batch_size)
        tables.close()
    return Result(
        table_shape=table_shape,
        num_dense_parameters=sum(parameter.numel() for parameter in dense),
        losses=mean_over_ranks(torch.stack(losses)).tolist(),
        validation_loss=validation_loss,
        words_per_s=world_size * args.batch_size * args.sequence_length / step_s,
        stats=stats,
    )


@torch.no_grad()
def evaluate(model: nn.Module, blocks: Tensor, batch_size: int) -> float:
    """Return nats per word of some blocks; every rank reads a part of them, in any number of batches."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)  # nats per word summed up over blocks, number of blocks
    own = blocks[dist.get_rank() :: dist.get_world_size()]
    for part in own.split(batch_size) if len(own) else ():
        loss = model(part[:, :-1], part[:, 1:])
        total += torch.stack([loss.double() * len(part), torch.tensor(float(len(part)))])
    nats, count = mean_over_ranks(total).tolist()
    return float(nats / count)


def mean_over_ranks(values: Tensor) -> Tensor:
    total = values.double()
    dist.all_reduce(total)
    return total / dist.get_world_size()


# Batches ----------------------------------------------------------------------------------------------


def make_loader(
    blocks: Tensor, batch_size: int, seed: int, rank: int, world_size: int
) -> DataLoader[tuple[Tensor, ...]]:
    """Return this rank's share of the blocks, shuffled: words, and the word after each, both (batch_size, length)."""
    if len(blocks) < batch_size * world_size:
        raise ValueError(
            f"expected at least batch size * ranks = {batch_size} * {world_size} blocks of text to train on, "
            f"found {len(blocks)}; give more text or a smaller --batch-size or --sequence-length"
        )
    dataset = TensorDataset(blocks[:, :-1], blocks[:, 1:])
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset, world_size, rank, seed=seed)
    return DataLoader(dataset, batch_size, sampler=sampler, drop_last=True)


# Model --------------------------------------------------------------------------------------------------


class LanguageModel(nn.Module):
    """Two layers of LSTM between a table of words and an output layer that spends little on rare ones.

    Args:
        num_words: in the vocabulary, whose ids go from frequent to rare.
        embedding_dim: numbers per word in the table.
        hidden_size: of the LSTM.
    """

    def __init__(self, num_words: int, embedding_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_words, embedding_dim, sparse=True)
        self.lstm = nn.LSTM(embedding_dim, hidden_size, num_layers=2, batch_first=True)
        cutoffs = [num_words // 8, num_words // 2]
        self.output = nn.AdaptiveLogSoftmaxWithLoss(hidden_size, num_words, cutoffs)  # grave2017
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        """Return mean nats per word of ``targets``, which come after ``words``; both (batch_size, length), int64."""
        states, _ = self.lstm(self.embedding(words))
        loss: Tensor = self.output(states.flatten(0, 1), targets.flatten()).loss
        # Targets without rare words leave those words' part of the layer out, for whose gradient DDP would wait.
        return loss + 0.0 * sum(weight.sum() for weight in self.output.tail.parameters())


# Results ------------------------------------------------------------------------------------------------


def report(args: argparse.Namespace, result: Result) -> None:
    num_words, dim = result.table_shape
    table = Table(title="LSTM language model", show_header=False, box=None)
    table.add_row("tables", args.tables)
    table.add_row("ranks", str(dist.get_world_size()))
    table.add_row("steps", f"{args.steps} with {args.optimizer}")
    table.add_row("table of words", f"{num_words:,} × {dim}, {num_words * dim:,} parameters")
    table.add_row("other parameters", f"{result.num_dense_parameters:,}")
    table.add_row("perplexity, first and last step", f"{math.exp(result.losses[0]):.1f}, {perplexity(result):.1f}")
    table.add_row("perplexity, validation", f"{math.exp(result.validation_loss):.2f}")
    table.add_row("words per second", f"{result.words_per_s:,.0f}")
    if result.stats:
        means = mean_stats(result.stats)
        table.add_section()
        table.add_row("a step looks up", f"{means['num_rows']:,.0f} rows for {means['num_ids']:,.0f} words")
        prior, delayed = means["num_prior_rows"], means["num_delayed_rows"]
        table.add_row("gradients", f"{prior:,.0f} prior rows, {delayed:,.0f} delayed ones")
        for kind in ("id", "lookup", "prior", "delayed"):
            table.add_row(f"{kind} bytes sent", f"{means[f'{kind}_bytes'] / 1e3:,.1f} kB")
        table.add_row("waiting for the table", f"{means['stall_s'] * 1e3:.1f} ms")
    Console().print(table)


def perplexity(result: Result) -> float:
    """Return the perplexity of the last step."""
    return math.exp(result.losses[-1])


def mean_stats(stats: Sequence[TableStats]) -> dict[str, float]:
    """Return the mean cost of a step."""
    rows = ["num_ids", "num_rows", "num_prior_rows", "num_delayed_rows"]
    names = [*rows, "id_bytes", "lookup_bytes", "prior_bytes", "delayed_bytes", "stall_s"]
    return {name: sum(getattr(one, name) for one in stats) / len(stats) for name in names}


def write(args: argparse.Namespace, result: Result) -> None:
    """Write results as JSON, and a picture of the perplexity beside it."""
    settings = {key: value for key, value in vars(args).items() if key not in ("text", "output", "compare")}
    run = {
        "settings": {**settings, "ranks": dist.get_world_size()},
        "losses": result.losses,
        "perplexities": [math.exp(loss) for loss in result.losses],
        "validation_perplexity": math.exp(result.validation_loss),
        "words_per_s": result.words_per_s,
        "stats": mean_stats(result.stats) if result.stats else None,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(run, indent=1), encoding="utf-8")
    picture = args.output.with_suffix(".png")
    plot([run, *(json.loads(path.read_text(encoding="utf-8")) for path in args.compare)], picture)
    print(f"Wrote {args.output} and {picture}")


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw perplexity over steps, as in Fig. 11(a) of EmbRace; runs to compare with are dashed."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots(figsize=(6, 4))
    for index, run in enumerate(runs):
        settings, curve = run["settings"], run["perplexities"]
        label = f"{settings['tables']}, {settings['optimizer']}: {run['validation_perplexity']:.1f} in validation"
        ax.plot(range(1, len(curve) + 1), curve, "--" if index else "-", label=label)
    ax.set_yscale("log")
    ax.set_xlabel("step")
    ax.set_ylabel("perplexity")
    ax.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


# Command line -------------------------------------------------------------------------------------------


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a word-level LSTM language model with a sharded table, or with plain DDP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--tables", choices=["embrace", "ddp"], default="embrace", help="sharded, or a sparse one under plain DDP")
    add("--optimizer", choices=OPTIMIZERS, default="adam", help="adam: SparseAdam for the table")
    add("--steps", type=positive, default=200)
    add("--batch-size", type=positive, default=16, help="blocks per rank and step")
    rates = ", ".join(f"{lr} for {name}" for name, lr in LEARNING_RATES.items())
    add("--lr", type=float, default=argparse.SUPPRESS, help=f"learning rate (default: {rates})")
    add("--seed", type=int, default=0)
    add("--log-every", type=positive, default=20, metavar="STEPS")
    add("--output", type=Path, metavar="JSON", help="file for losses; a picture is put beside it")
    add("--compare", type=Path, nargs="+", default=[], metavar="JSON", help="earlier runs, for the same picture")

    add_text_arguments(parser)
    model = parser.add_argument_group("model")
    model.add_argument("--vocabulary", type=positive, default=10000, help="words, at most; others are <unk>")
    model.add_argument("--sequence-length", type=positive, default=32, help="words per block")
    model.add_argument("--embedding", type=positive, default=256, help="numbers per word in the table")
    model.add_argument("--hidden", type=positive, default=256, help="size of the LSTM")

    args = parser.parse_args(argv)
    args.lr = getattr(args, "lr", LEARNING_RATES[args.optimizer])
    if args.vocabulary < 8:
        parser.error(f"--vocabulary must be at least 8, for an output layer in three parts, got {args.vocabulary}")
    if args.hidden < 16:
        parser.error(f"--hidden must be at least 16, of which rare words get a sixteenth, got {args.hidden}")
    if args.compare and args.output is None:
        parser.error("--compare adds curves to the picture beside --output: say where that is")
    return args


if __name__ == "__main__":
    main()
