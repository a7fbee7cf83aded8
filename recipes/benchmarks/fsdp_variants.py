"""FSDP2 as benchmarks compare it: as it is, extended, and with what tuning finds."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from fsdp_ext import ExtConfig, Extension, TuneConfig, extend, restore, tune
from recipes.benchmarks.emulation import emulate
from recipes.benchmarks.variants import OptimizerFactory, Sharding, Stock, Trainee, VariantSpec
from recipes.benchmarks.workloads import Workload


def build_fsdp2(spec: VariantSpec, workload: Workload, slow: float, make_optimizer: OptimizerFactory) -> Trainee:
    """FSDP2, sharding blocks of about one size and the rest at the root; with its own communication, or extended.

    On accelerators FSDP2 prefetches because the host runs ahead of the device. A CPU has no such lead, so with its own
    communication every gather is asked for at the start of the step: without that no gather would overlap anything, as
    with `fsdp2:ahead=False`.
    """
    trainee = _built(spec, workload, slow, make_optimizer)
    trainee.micro_batches = spec.sharding.micro_batches
    if spec.sharding.reduce_once:
        assert isinstance(trainee.model, FSDPModule)
        trainee.begin_micro_batch = trainee.model.set_requires_all_reduce
    return trainee


def _built(spec: VariantSpec, workload: Workload, slow: float, make_optimizer: OptimizerFactory) -> Trainee:
    if spec.kind == "fsdp2-tuned":
        return _tuned(spec, workload, slow, make_optimizer)
    model = _sharded(workload, slow, spec.sharding, _mesh(spec.sharding))
    optimizer = _optimizer(model, make_optimizer, spec.sharding)
    if spec.kind == "fsdp2-ext":
        return _extended(model, optimizer, extend(model, ExtConfig(**spec.settings)))
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]  # the root first

    def launch_gathers() -> None:
        for module in sharded:
            module.unshard(async_op=True)

    return Trainee(model, optimizer, begin_step=launch_gathers if Stock(**spec.settings).ahead else lambda: None)


def _optimizer(model: nn.Module, make_optimizer: OptimizerFactory, sharding: Sharding) -> torch.optim.Optimizer:
    optimizer = make_optimizer(model.parameters())
    if not sharding.set_to_none:
        optimizer.zero_grad = partial(optimizer.zero_grad, set_to_none=False)  # type: ignore[method-assign]
    return optimizer


def _mesh(sharding: Sharding) -> DeviceMesh:
    if sharding.replicas == 1:
        return init_device_mesh("cpu", (dist.get_world_size(),))
    shape = (sharding.replicas, dist.get_world_size() // sharding.replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def _sharded(workload: Workload, slow: float, sharding: Sharding, mesh: DeviceMesh) -> nn.Sequential:
    model = emulate(workload, slow, int(sharding.block_mb * 2**20), int(sharding.first_mb * 2**20))
    for block in model:
        if isinstance(block, nn.Sequential):
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(sharding.force_sums)
    return model


def _tuned(spec: VariantSpec, workload: Workload, slow: float, make_optimizer: OptimizerFactory) -> Trainee:
    """With what :func:`fsdp_ext.tune` finds in the first round, and remembers in the others."""

    def step(model: nn.Module) -> None:
        optimizer = _optimizer(model, make_optimizer, spec.sharding)
        optimizer.zero_grad()
        model(torch.ones(1)).sum().backward()
        optimizer.step()

    profile = Path(tempfile.gettempdir()) / f"fsdp_benchmark_{os.getppid()}.json"
    tuner = TuneConfig(max_trials=8, dropped_steps=2, steps_per_trial=2, profile=profile)

    def make(block_mb: float) -> nn.Sequential:
        return _sharded(workload, slow, replace(spec.sharding, block_mb=block_mb), _mesh(spec.sharding))

    found = tune(make, step, ExtConfig(**spec.settings), tuner)
    model = make(found.block_mb)
    optimizer = _optimizer(model, make_optimizer, spec.sharding)
    extension = found.apply(model)
    tuned = {"block_mb": found.block_mb, "trials": float(found.num_trials)}
    if extension is None:  # nothing was faster than stock
        return Trainee(model, optimizer, finish=lambda: tuned)
    trainee = _extended(model, optimizer, extension)
    tuned["prefetch"] = float(-1 if extension.config.prefetch is None else extension.config.prefetch)
    return replace(trainee, finish=lambda: {**trainee.finish(), **tuned})


def _extended(model: nn.Module, optimizer: torch.optim.Optimizer, extension: Extension) -> Trainee:
    begun: list[int] = []  # bytes that were sent before each step; in the first one links are measured, too

    def finish() -> dict[str, float]:
        statistics = asdict(extension.stats())
        restore(model)
        if len(begun) > 1:
            statistics["sent_bytes_per_step"] = (statistics["sent_bytes"] - begun[1]) / (len(begun) - 1)
        return statistics

    return Trainee(model, optimizer, begin_step=lambda: begun.append(extension.stats().sent_bytes), finish=finish)
