"""Losses of a Llama under FSDP2, as it is and with every wire format of ``fsdp_ext``.

    python -m recipes.benchmarks.fsdp_losses
    python -m recipes.benchmarks.fsdp_losses --results build/fsdp_losses/fsdp_losses.json --markdown page.md
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_ext import ExtConfig, extend, restore
from recipes.benchmarks.harness import Benchmark, Run, main_of, run_job
from recipes.benchmarks.harness.worker import report, total
from recipes.common.batches import endless_batches
from recipes.common.pages import Page, Part, Picture, Table
from recipes.common.schedules import warmed_cosine
from recipes.common.texts import python_documentation
from recipes.common.tokens import cut_into_blocks, hold_out, shared_tokenizer

BATCH_SIZE, BLOCK_LENGTH = 8, 64
VARIANTS: dict[str, ExtConfig | None] = {  # None: FSDP2 as it is
    "FSDP2": None,
    "exact": ExtConfig(),
    "all_gather=bf16": ExtConfig(all_gather="bf16"),
    "all_gather=int8": ExtConfig(all_gather="int8"),
    "reduce_scatter=bf16": ExtConfig(reduce_scatter="bf16"),
    "reduce_scatter=int8": ExtConfig(reduce_scatter="int8"),
    "both int8": ExtConfig(all_gather="int8", reduce_scatter="int8"),
    "reduce_scatter=sparse": ExtConfig(reduce_scatter="sparse"),
}
INTRODUCTION = """\
A Llama of 6.2 million parameters learns from Python's documentation, sharded by FSDP2 layer by layer. All variants \
begin with the same weights and see the same batches. These are single runs: differences of less than 0.01 may be \
chance."""


@dataclass(frozen=True)
class Job:
    """Training of one variant.

    Args:
        variant: a name in :data:`VARIANTS`.
        steps: of the optimizer.
    """

    variant: str
    steps: int


def train(job: Job) -> dict[str, Any]:
    """Train on this worker; return losses of every step, the loss on held-out text, and MB sent per step."""
    texts = python_documentation()
    tokenizer = shared_tokenizer(texts, 4000)
    training, held_out = hold_out(cut_into_blocks(texts, tokenizer, BLOCK_LENGTH, marked=False))
    model = make_llama(len(tokenizer))
    config = VARIANTS[job.variant]
    extension = extend(model, config) if config is not None else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = LambdaLR(optimizer, warmed_cosine(max(1, job.steps // 10), job.steps))
    losses = []
    for (ids,) in itertools.islice(endless_batches(TensorDataset(training), BATCH_SIZE), job.steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    sent_mb = extension.stats().sent_bytes / 1e6 / job.steps if extension is not None else None
    found = evaluate(model, held_out)
    restore(model)
    means = [value / dist.get_world_size() for value in total(*losses)]
    report(f"{job.variant}: training loss {means[-1]:.4f}, held out {found:.4f}")
    return {"losses": means, "held_out": found, "sent_mb": sent_mb}


def make_llama(num_tokens: int) -> Any:
    """Return a Llama whose layers FSDP2 shards, the same on every rank."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=num_tokens, use_cache=False, **sizes))
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


@torch.no_grad()
def evaluate(model: nn.Module, blocks: Tensor) -> float:
    """Return the mean loss of blocks; ranks run forwards together, so each takes as many."""
    num_ranks = dist.get_world_size()
    own = blocks[: len(blocks) // num_ranks * num_ranks][dist.get_rank() :: num_ranks]
    losses = [float(model(input_ids=ids, labels=ids).loss) * len(ids) for ids in own.split(BATCH_SIZE)]
    return total(sum(losses))[0] / (len(own) * num_ranks)


def measure(options: argparse.Namespace, workers: int, rate: str | None) -> Iterator[dict[str, Any]]:
    for name in options.variants:
        if name not in VARIANTS:
            raise ValueError(f"--variants must be of {', '.join(VARIANTS)}, got {name}")
        job = Job(name, options.steps)
        yield {"variant": name, "steps": options.steps, **run_job(train, job, workers, rate)}


def page(runs: Sequence[Run]) -> Page:
    results = [result for run in runs for result in run.results]

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for index, result in enumerate(results):
            axes.plot(result["losses"], "--" if index % 2 else "-", linewidth=1.2, alpha=0.8, label=result["variant"])
        axes.set_xlabel("step")
        axes.set_ylabel("training loss")
        axes.legend(fontsize=8)

    rows = [
        [
            f"`{result['variant']}`",
            str(result["steps"]),
            f"{result['losses'][-1]:.4f}",
            f"{result['held_out']:.4f}",
            "" if result["sent_mb"] is None else f"{result['sent_mb']:.1f}",
        ]
        for result in results
    ]
    title = f"{results[0]['workers']} workers"
    table = Table(title, ("variant", "steps", "training loss", "held-out loss", "MB sent per step"), rows)
    parts: list[Part] = [INTRODUCTION, table, Picture("Training loss of every variant over its steps", draw)]
    return Page("Losses with FSDP2 and fsdp_ext", parts, [run.origin for run in runs])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--steps", type=int, default=200, help="of the optimizer")


BENCHMARK = Benchmark(
    "fsdp_losses",
    "Compare losses of FSDP2 with and without fsdp_ext.",
    measure,
    page,
    add_options,
    workers=(2,),
    on_links=False,
    quick={"variants": ["FSDP2", "both int8"]},
)

if __name__ == "__main__":
    main_of(__spec__)
