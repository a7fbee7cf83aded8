"""Loops whose results are those of plain FSDP2, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from fsdp_ext import ExtConfig
from tests.support.fsdp_ext import twins
from tests.support.fsdp_ext.twins import CONFIG

SMALL = {"num_blocks": 2}  # and the root: three groups, of which one may wait and one follow
LOOPS = [
    twins.plain,
    twins.zero_grad_to_zeros,
    twins.never_zero_grad,
    twins.two_backwards,
    twins.accumulate,
    twins.accumulate_unsharded,
    twins.clip,
    twins.evaluate,
    twins.discarded,
    twins.two_forwards,
]
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
BF16_SUMMED_IN_32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP16_SUMS = MixedPrecisionPolicy(reduce_dtype=torch.float16)


def check(outcomes: list[twins.Outcome]) -> twins.ExtStats:
    for outcome in outcomes:
        assert outcome.moved and outcome.differing == []
    stats: twins.ExtStats = outcomes[0].stats
    return stats


def each(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def force_sums(model: nn.Module) -> None:
    for module in each(model):
        module.set_force_sum_reduction_for_comms(True)


def divide_by_eight(model: nn.Module) -> None:
    force_sums(model)
    for module in each(model):
        module.set_gradient_divide_factor(8.0)


def all_reduce_hook(model: nn.Module) -> None:
    for module in each(model):
        module.set_all_reduce_hook(_double)


def _double(reduced: torch.Tensor) -> None:
    reduced.mul_(2)


def hook_on_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(_halve)


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def include_unused(model: nn.Module) -> None:
    for module in each(model):
        module.set_reduce_scatter_unused_params(True)


def train_gpt2(
    rank: int,
    world_size: int,
    compiled: bool,
    ext_config: ExtConfig = CONFIG,
    dtype: torch.dtype = torch.float64,
) -> float:
    """The largest difference between extended and stock after some steps."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=2, attn_pdrop=0, resid_pdrop=0)
    config.embd_pdrop = 0.0
    models = []
    for extended in (True, False):
        torch.manual_seed(1)
        model: Any = GPT2LMHeadModel(config)
        model = model.to(dtype)
        for block in model.transformer.h:
            if compiled:
                block.compile()
            twins.fully_shard(block)
        twins.fully_shard(model)
        if extended:
            extension = twins.extend(model, ext_config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(twins.NUM_STEPS):
            ids = torch.randint(0, 97, (2, 16), generator=generator)
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        models.append(model)
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    gap = max(float((twins.local(a) - twins.local(b)).abs().max()) for a, b in pairs)
    assert bool(extension.stats().early) == (not ext_config.defer), "only what is waited for begins early"
    twins.restore(models[0])
    return gap
