"""DeAR on NCCL: the bits of plain DDP, with reduce-scatters, updates and all-gathers in stream order.

Prevents: gradients that are read, and parameters that are used, before a stream has written them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from ddp_hooks import DearConfig
from tests.support.dear import compiled, reading, twins
from tests.support.dear.clipping import BAD_STEPS, clip_by_setting, clip_norm, half, momentum_sgd, scaled
from tests.support.dear.loops import LOOPS, adamw_two_groups, in_bfloat16
from tests.support.dear.loops import momentum_sgd as exact_sgd
from tests.support.dear.masters import MASTERED, with_masters
from tests.support.dear.masters import adamw as slow_adamw
from tests.support.dear.twins import CONFIG, Outcome, Trainee, WholeNumbers, whole_batches
from tests.support.models import Classifier, adamw, encoder, gpt2, ids, rows, sequences, sgd
from tests.support.workers import WorkerPools


def check(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        # Parameters are views of other memory, so that their sums, the losses, may be rounded otherwise.
        assert outcome.parameter_gap == 0 and outcome.loss_gap < 1.0, outcome
        assert outcome.loss_drop != 0


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("optimizer", [exact_sgd, adamw_two_groups], ids=lambda make: make.__name__)
def test_steps(gpu_workers: WorkerPools, world_size: int, optimizer: Any) -> None:
    outcomes = gpu_workers(world_size).run(twins.compare, WholeNumbers, whole_batches, optimizer, twins.plain, 8)
    check(outcomes)
    assert all((outcome.stats.sent_bytes > 0) == (world_size > 1) for outcome in outcomes)


@pytest.mark.parametrize("update", ["sharded", "replicated"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_loops(gpu_workers: WorkerPools, loop: Callable[[Trainee, int], None], update: Any) -> None:
    run = partial(twins.compare, config=replace(CONFIG, update=update))
    check(gpu_workers(2).run(run, WholeNumbers, whole_batches, exact_sgd, loop, 9))


@pytest.mark.parametrize("kind", reading.CONFIGS)
def test_reads_and_writes_after_a_step(gpu_workers: WorkerPools, kind: str) -> None:
    assert gpu_workers(2).run(reading.differing, kind) == [[], []]


def test_compiled_blocks(gpu_workers: WorkerPools) -> None:
    run = partial(twins.compare, ddp_options={"bucket_cap_mb": 1})
    for outcome in gpu_workers(2).run(run, compiled.blocks, partial(rows, 12), adamw, compiled.compiled_blocks, 10):
        assert outcome.parameter_gap < 1e-10, outcome


@pytest.mark.parametrize(
    "config",
    [replace(CONFIG, update="replicated"), replace(CONFIG, lanes=1, fusion="none", fusion_mb=None)],
    ids=["replicated", "one"],
)
@pytest.mark.parametrize("loop", [twins.plain, twins.accumulate], ids=lambda loop: loop.__name__)
def test_settings(gpu_workers: WorkerPools, config: DearConfig, loop: Any) -> None:
    run = partial(twins.compare, config=config)
    check(gpu_workers(2).run(run, WholeNumbers, whole_batches, exact_sgd, loop, 9))


def test_masters(gpu_workers: WorkerPools) -> None:
    run = partial(twins.compare, config=MASTERED, ddp_options={"bucket_cap_mb": 0.02})
    for outcome in gpu_workers(2).run(run, in_bfloat16, whole_batches, slow_adamw, partial(with_masters, 2), 9):
        assert outcome.parameter_gap == 0, outcome


@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_grad_scaler(gpu_workers: WorkerPools, clip: bool, fused: bool) -> None:
    model, optimizer = partial(half, torch.float16), partial(momentum_sgd, fused)
    run = partial(twins.compare, config=replace(CONFIG, on_nonfinite="raise" if clip else None))
    for outcome in gpu_workers(2).run(run, model, sequences, optimizer, partial(scaled, clip), 9):
        assert outcome.parameter_gap < 1e-5 and outcome.loss_gap < 1e-5, outcome
        assert outcome.stats.step == 9 - len(BAD_STEPS)


@pytest.mark.parametrize("world_size", [2, 4])
def test_clipping(gpu_workers: WorkerPools, world_size: int) -> None:
    for loop, config in [
        (partial(clip_norm, 2.0, 0.05), CONFIG),
        (clip_by_setting, replace(CONFIG, max_grad_norm=0.05, on_nonfinite="skip")),
    ]:
        run = partial(twins.compare, config=config)
        for outcome in gpu_workers(world_size).run(run, encoder, sequences, sgd, loop, 6):
            assert outcome.parameter_gap < 1e-10 and outcome.loss_gap < 1e-10, outcome


def resnet18(world_size: int) -> nn.Module:
    from torchvision.models import resnet18 as make

    return Classifier(make(num_classes=10).to(memory_format=torch.channels_last)).double()


def images(rank: int, world_size: int, step: int) -> Any:
    generator = torch.Generator().manual_seed(31 * (step % 2) + rank)
    batch = torch.randn(8, 3, 64, 64, generator=generator, dtype=torch.float64)
    return batch.to(memory_format=torch.channels_last), torch.randint(0, 10, (8,), generator=generator)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(("model", "batches"), [(resnet18, images), (gpt2, ids)], ids=["resnet18", "gpt2"])
def test_real_models(gpu_workers: WorkerPools, world_size: int, model: Any, batches: Any) -> None:
    """With computation that lasts, so that a stream that does not wait is found out."""
    for outcome in gpu_workers(world_size).run(
        partial(twins.compare, config=replace(CONFIG, atom_mb=1, fusion_mb=4), ddp_options={"bucket_cap_mb": 4}),
        model, batches, sgd, twins.plain, 8,
    ):  # fmt: skip
        assert outcome.parameter_gap < 1e-8 and outcome.loss_gap < 1e-8, outcome
        assert outcome.order_known == (world_size > 1) and outcome.loss_drop > 0
