"""One worker of the benchmark of compiled models, started once per rank: `python -m … JOB.json`."""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the types themselves.
import gc
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM

from ddp_hooks import DearState, dear_hook
from recipes.benchmarks.compiled_job import CompiledJob, parse
from recipes.benchmarks.variants import Trainee
from recipes.benchmarks.worker import report, run, timed_window

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


def main() -> None:
    job = CompiledJob.load(Path(sys.argv[1]))
    run(job, lambda: compare(job))


def compare(job: CompiledJob) -> dict[str, Any]:
    """Runs every variant once per round, so that slow phases of the machine hit all of them alike."""
    windows: dict[str, list[dict[str, float]]] = {name: [] for name in job.variants}
    graphs: dict[str, int] = {}
    for round_index in range(job.rounds):
        for name in job.variants:
            trainee = build(job, name)
            window = timed_window(trainee, job.warmup_steps, job.timed_steps)
            windows[name].append(asdict(window))
            graphs[name] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            dist.barrier()
            trainee.finish()
            num_parameters = sum(parameter.numel() for parameter in trainee.model.parameters())
            del trainee
            gc.collect()  # DDP and its reducer refer to each other
            report(f"round {round_index + 1}/{job.rounds} {name}: {window.step_s:.3f} s per step")
    return {"windows": windows, "graphs": graphs, "num_parameters": num_parameters}


def build(job: CompiledJob, name: str) -> Trainee:
    """Makes the model, compiles what is to be compiled, and wraps it. Every rank calls this at the same time."""
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


if __name__ == "__main__":
    main()
