"""Work of one worker of the benchmark of compiled models."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM

from ddp_hooks import DearState, dear_hook
from recipes.benchmarks.compiled import CompiledJob, parse
from recipes.benchmarks.harness.worker import take_turns
from recipes.benchmarks.steps_worker import timed_window
from recipes.benchmarks.variants import Trainee

VOCABULARY = 8192
SEQUENCE = 64


class LanguageModel(nn.Module):
    """A BERT with its loss."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 4 * hidden}
        self.bert = BertForMaskedLM(
            BertConfig(vocab_size=VOCABULARY, num_attention_heads=max(1, hidden // 64), **sizes)
        )

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.bert(input_ids=ids, labels=ids).loss
        return loss


def train_in_turns(job: CompiledJob) -> dict[str, Any]:
    """Train with all variants in turns."""
    windows = take_turns(job.variants, job.rounds, lambda name: train(job, name))
    num_parameters = sum(parameter.numel() for parameter in LanguageModel(job.layers, job.hidden).parameters())
    return {"windows": windows, "num_parameters": num_parameters}


def train(job: CompiledJob, name: str) -> dict[str, Any]:
    """Time a window of one variant, and count its graphs."""
    trainee = build(job, name)
    window = timed_window(trainee, job.warmup, job.steps)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    dist.barrier()
    trainee.finish()
    return {**asdict(window), "graphs": graphs}


def build(job: CompiledJob, name: str) -> Trainee:
    """Make the model, compile it as the variant says, and wrap it; collective."""
    variant = parse(name)
    torch._dynamo.reset()  # or the next variant gets this one's graphs
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    model = LanguageModel(job.layers, job.hidden)
    if variant.what == "blocks":
        for layer in model.bert.bert.encoder.layer:
            layer.compile(backend=job.backend)
    ddp = DistributedDataParallel(
        model, bucket_cap_mb=variant.bucket_mb, gradient_as_bucket_view=True, init_sync=False
    )
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-4)
    finish: Callable[[], dict[str, float]] = dict
    if variant.hook == "dear":
        state = DearState(ddp, optimizer)
        ddp.register_comm_hook(state, dear_hook)

        def finish() -> dict[str, float]:
            state.synchronize()
            state.close()
            return {}

    called: Any = torch.compile(ddp, backend=job.backend) if variant.what == "whole" else ddp
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, VOCABULARY, (job.tokens // SEQUENCE, SEQUENCE), generator=generator)
    return Trainee(called, optimizer, finish=finish, inputs=(ids,))
