"""Work of one worker of the EmbRace benchmark."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import (
    DearState,
    EmbeddingState,
    EmbeddingTables,
    ShardedEmbedding,
    TableConfig,
    TopKConfig,
    TopKState,
    dear_hook,
    embedding_hook,
    shard_embeddings,
    topk_hook,
)
from recipes.benchmarks.embrace import EmbraceJob
from recipes.benchmarks.embrace_workloads import (
    BACKWARD_PER_FORWARD,
    PADDING,
    EmbraceWorkload,
    TableSpec,
    make_ids,
    square_shapes,
)
from recipes.benchmarks.emulation import EmulatedLayer, SleepClock, gradient_values
from recipes.benchmarks.harness.worker import processor_s, report, slowest, take_turns, total
from recipes.benchmarks.push_pull import PushPullTable
from recipes.benchmarks.steps_worker import goodput_bytes_per_s

LR = 1e-3
BUCKET_MB = 25.0
SMALL_BUCKET_MB = 5.0  # with DeAR


@dataclass(frozen=True)
class Window:
    """Per step; seconds of the slowest rank, bytes of the mean one, CPU seconds of all together."""

    step_s: float
    sent_bytes: float
    cpu_s: float


@dataclass
class Trainee:
    """A variant, ready to train.

    Args:
        model: wrapped.
        optimizers: to step, in this order.
        wrap: makes the loader of the variant.
        finish: ends it.
    """

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    wrap: Callable[[list[Any]], Iterable[Any]] = field(default=lambda batches: batches)
    finish: Callable[[], None] = field(default=lambda: None)


class LanguageModel(nn.Module):
    """Tables whose vectors are real, between blocks that sleep."""

    def __init__(self, workload: EmbraceWorkload, tables: dict[str, nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(tables)
        self.specs = workload.tables
        clock = SleepClock()
        forward_s = workload.compute_s / (1 + BACKWARD_PER_FORWARD) / len(workload.block_numels)
        shapes = [square_shapes(numel) for numel in workload.block_numels]
        constant = gradient_values(max(rows * columns for block in shapes for rows, columns in block))
        blocks = []
        for block in shapes:
            parameters = {f"p{i}": nn.Parameter(torch.full(shape, 0.01)) for i, shape in enumerate(block)}
            gradients = [constant[: p.numel()].view_as(p) for p in parameters.values()]
            times = forward_s, forward_s * BACKWARD_PER_FORWARD
            blocks.append(EmulatedLayer(parameters, (), gradients, *times, clock))
        self.blocks = nn.ModuleList(blocks)
        self.constants = {t.name: gradient_values(t.num_ids * t.dim).view(t.num_ids, t.dim) for t in workload.tables}

    def forward(self, ids: dict[str, Tensor]) -> Tensor:
        activation = torch.zeros(1)
        for place in range(len(self.blocks) + 1):
            for spec in self.specs:
                if spec.before_block == place:
                    vectors = self.tables[spec.name](ids[spec.name])
                    activation = _Join.apply(activation, vectors, self.constants[spec.name])
            if place < len(self.blocks):
                activation = self.blocks[place](activation)
        return activation.sum()


class _Join(torch.autograd.Function):
    """Vectors are needed here; their gradient is a constant."""

    @staticmethod
    def forward(ctx: Any, activation: Tensor, vectors: Tensor, constant: Tensor) -> Tensor:
        ctx.constant = constant
        return activation.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, ctx.constant, None


def compare(job: EmbraceJob) -> dict[str, Any]:
    """Train with all variants in turns."""
    goodput = goodput_bytes_per_s()
    details: dict[str, dict[str, Any]] = {}
    data = make_batches(job)

    def measure(name: str) -> dict[str, float]:
        window, found = run_variant(job, name, data)
        details.setdefault(name, {}).update(found)
        return asdict(window)

    windows = take_turns(job.variants, job.rounds, measure)
    return {"goodput_bytes_per_s": goodput, "windows": windows, "details": details}


def make_batches(job: EmbraceJob) -> list[dict[str, Tensor]]:
    """For warming up, one step before the window, the window, and one that is only looked ahead to."""
    count = job.warmup + job.steps + 2
    place = dist.get_world_size(), dist.get_rank()
    return [{table.name: make_ids(table, *place, step) for table in job.workload.tables} for step in range(count)]


def run_variant(job: EmbraceJob, name: str, data: list[dict[str, Tensor]]) -> tuple[Window, dict[str, Any]]:
    """Builds one variant, times it, and drops it again."""
    trainee = build(name, job.workload)
    begin_s = begin_cpu_s = 0.0
    sent, window, details = 0, None, {}
    for step, ids in enumerate(trainee.wrap(data)):
        if step == job.warmup:
            dist.barrier()
        if step == job.warmup + 1:
            begin_s, begin_cpu_s, sent = time.perf_counter(), processor_s(), bytes_on_wire()
        if step == job.warmup + 1 + job.steps:
            ends = time.perf_counter() - begin_s, bytes_on_wire() - sent, processor_s() - begin_cpu_s  # before a wait
            step_s, sent_bytes, cpu_s = (each / job.steps for each in ends)
            counted = total(sent_bytes, cpu_s)
            window = Window(slowest(step_s)[0], counted[0] / dist.get_world_size(), counted[1])
            details = details_of(trainee.model)
        for optimizer in trainee.optimizers:
            optimizer.zero_grad()
        trainee.model(ids).backward()
        for optimizer in trainee.optimizers:
            optimizer.step()
    assert window is not None
    dist.barrier()
    trainee.finish()
    return window, details


def details_of(model: nn.Module) -> dict[str, Any]:
    """Of the last step, the mean over the ranks, where tables are sharded."""
    sharded = [module for module in model.modules() if isinstance(module, ShardedEmbedding)]
    if not sharded:
        return {}
    tables = sharded[0].tables
    assert isinstance(tables, EmbeddingTables)
    found = asdict(tables.stats())
    stats = {key: float(value) for key, value in found.items() if key not in ("clip", "step")}
    means = total(*stats.values())
    return dict(zip(stats, (value / dist.get_world_size() for value in means), strict=True))


def bytes_on_wire() -> int:
    """What this worker's interfaces have sent so far, headers included; on loopback, a worker's share."""
    sent = {}
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        sent[name.strip()] = int(numbers.split()[8])
    others = sum(count for name, count in sent.items() if name != "lo")
    return others if len(sent) > 1 and others > sent.get("lo", 0) else sent["lo"] // dist.get_world_size()


# -- variants -------------------------------------------------------------------------------------------------------


def build(name: str, workload: EmbraceWorkload) -> Trainee:
    if name == "push-pull":
        return _push_pull(workload)
    if name in ("ddp-dense", "dense-priority", "ddp-sparse", "embedding-hook"):
        return _replicated(name, workload)
    return _sharded(name, workload)


def _embedding(table: TableSpec, sparse: bool) -> nn.Embedding:
    # torch.zeros writes all of them; with NumPy's, eight workers have memory for the language model at half its width.
    weight = torch.from_numpy(np.zeros((table.num_rows, table.dim), np.float32))
    padding_idx = PADDING if table.padded else None
    return nn.Embedding(table.num_rows, table.dim, padding_idx=padding_idx, sparse=sparse, _weight=weight)


def _wrapped(model: nn.Module, bucket_mb: float = BUCKET_MB) -> DistributedDataParallel:
    # Every rank has made the same weights: spare the slow link.
    return DistributedDataParallel(model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, init_sync=False)


def _replicated(name: str, workload: EmbraceWorkload) -> Trainee:
    sparse = name in ("ddp-sparse", "embedding-hook")
    model = LanguageModel(workload, {table.name: _embedding(table, sparse) for table in workload.tables})
    ddp = _wrapped(model, SMALL_BUCKET_MB if name == "dense-priority" else BUCKET_MB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    if name == "dense-priority":
        state = DearState(ddp, optimizer)
        ddp.register_comm_hook(state, dear_hook)
        return Trainee(ddp, [optimizer], finish=state.close)
    if name == "embedding-hook":
        sums = EmbeddingState(ddp)
        ddp.register_comm_hook(sums, embedding_hook)
        return Trainee(ddp, [optimizer], finish=sums.close)
    return Trainee(ddp, [optimizer])


def _push_pull(workload: EmbraceWorkload) -> Trainee:
    tables: dict[str, nn.Module] = {t.name: PushPullTable(t.num_rows, t.dim, LR) for t in workload.tables}
    ddp = _wrapped(LanguageModel(workload, tables))
    return Trainee(ddp, [torch.optim.SGD(ddp.parameters(), lr=LR)])


def _sharded(name: str, workload: EmbraceWorkload) -> Trainee:
    model = LanguageModel(workload, {table.name: _embedding(table, True) for table in workload.tables})
    schedules = {"sharded": "none", "horizontal": "horizontal"}
    config = TableConfig(schedule=schedules.get(name, "2d"), init_sync=False)  # type: ignore[arg-type]
    tables = shard_embeddings(model, None, 1, torch.optim.SGD, config=config, lr=LR)
    with_dear = name in ("horizontal", "2d")
    ddp = _wrapped(model, SMALL_BUCKET_MB if with_dear else BUCKET_MB)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LR)
    closing: list[DearState | TopKState | EmbeddingTables] = [tables]
    tables.follow(optimizer)
    if with_dear:
        state = DearState(ddp, optimizer)
        ddp.register_comm_hook(state, dear_hook)
        closing.insert(0, state)
    elif name == "2d-topk":
        sparse = TopKState(ddp, TopKConfig(density=0.01))
        ddp.register_comm_hook(sparse, topk_hook)
        closing.insert(0, sparse)
    names = {spec.name: f"tables.{spec.name}" for spec in workload.tables}

    def wrap(data: list[Any]) -> Iterable[Any]:
        if name == "sharded":
            return data
        return tables.prefetch(data, lambda batch: {names[key]: ids for key, ids in batch.items()})

    def finish() -> None:
        for one in closing:
            one.close()

    return Trainee(ddp, [optimizer], wrap, finish)


# -- one exchange ---------------------------------------------------------------------------------------------------


def sweep(job: EmbraceJob) -> dict[str, Any]:
    """Seconds for one table's exchange of a step by each approach and density (the paper's Fig. 4)."""
    table = job.workload.tables[0]
    goodput = goodput_bytes_per_s()
    found: dict[str, dict[str, list[float]]] = {name: {} for name in job.variants}
    for name in job.variants:
        exchange, close = _approach(name, table)
        for density in job.densities:
            generator = np.random.default_rng([dist.get_rank(), round(1e6 * density)])
            chosen = generator.choice(table.num_rows, max(1, round(density * table.num_rows)), replace=False)
            ids = torch.from_numpy(np.sort(chosen))
            seconds = []
            for _ in range(job.rounds + 1):
                dist.barrier()
                start_s = time.perf_counter()
                exchange(ids)
                seconds += slowest(time.perf_counter() - start_s)
            found[name][str(density)] = seconds[1:]
            report(f"{name}, density {density}: {statistics.median(seconds[1:]):.3f} s")
        close()
    return {"goodput_bytes_per_s": goodput, "sweep": found}


def _approach(name: str, table: TableSpec) -> tuple[Callable[[Tensor], None], Callable[[], None]]:
    """A function that does what a step exchanges for rows of a table, and one that ends it."""
    if name == "push-pull":
        rows = PushPullTable(table.num_rows, table.dim, LR)
        return lambda ids: rows(ids).sum().backward(), lambda: None
    if name == "alltoall":
        model = nn.ModuleDict({"table": nn.Embedding(table.num_rows, table.dim, sparse=True)})
        tables = shard_embeddings(model, None, 1, torch.optim.SGD, config=TableConfig(schedule="none"), lr=LR)

        def look_up_and_update(ids: Tensor) -> None:
            tables.zero_grad()
            model["table"](ids).sum().backward()
            tables.step()

        return look_up_and_update, tables.close
    dense = torch.zeros(table.num_rows, table.dim)

    def reduce(ids: Tensor) -> None:
        if name == "all-reduce":
            dist.all_reduce(dense)
            return
        values = torch.ones(len(ids), table.dim)
        dist.all_reduce(torch.sparse_coo_tensor(ids[None], values, dense.shape, is_coalesced=True))

    return reduce, lambda: None
