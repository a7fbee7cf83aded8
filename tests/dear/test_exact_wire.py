"""Exact 16 bits under real networks: the same losses and weights as ``wire="float32"``, in fewer bytes.

Prevents: a gradient that was rounded, or read by its receiver as something else, in any way in which loops make them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks import DearConfig, DearState, GradScaler, dear_hook
from ddp_hooks.comm import Lanes
from tests.support.messages import message_of
from tests.support.models import LanguageModel, images, resnet
from tests.support.workers import WorkerPools

LATE = 4  # step, of 6, in which a weight no longer fits


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": 256, "n_embd": 64, "n_layer": 1, "n_head": 4, "n_positions": 32}
    return LanguageModel(GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = BertConfig(**sizes, intermediate_size=128, max_position_embeddings=32)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return LanguageModel(BertForMaskedLM(config))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LanguageModel(LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=128, max_position_embeddings=32)))


def convolutions() -> Any:
    """Half of a ResNet: torch's last convolutions of so small images are not the same from run to run."""
    model: Any = resnet(1).float()
    model.network.layer3 = model.network.layer4 = nn.Identity()
    model.network.fc = nn.Linear(128, 10)
    return model


def checkpointed() -> Any:
    model: Any = gpt2()
    model.network.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class Wide(nn.Module):
    """A weight that is used twice, one for which nothing is cast, and one that fits until step 5."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(96, 96)
        self.direct = nn.Parameter(torch.randn(96, 96) / 96)
        self.later = nn.Parameter(torch.randn(96, 96) / 96)

    def forward(self, values: Tensor, step: int) -> Tensor:
        hidden = torch.tanh(self.shared(torch.tanh(self.shared(values))))
        hidden = hidden + (self.direct * hidden.float().mean(0)).sum(0)
        later = nn.functional.linear(hidden, self.later)
        if step >= LATE:
            later = later + (self.later * 0.3).sum(0)
        return later.float().square().mean()


def ids(rank: int, step: int) -> tuple[Any, ...]:
    return (torch.randint(0, 256, (4, 32), generator=torch.Generator().manual_seed(13 * step + rank)),)


def pictures(rank: int, step: int) -> tuple[Any, ...]:
    values, labels = images(rank, 1, step)
    return values.float(), labels


def rows(width: int) -> Callable[[int, int], tuple[Any, ...]]:
    return lambda rank, step: (torch.randn(8, width, generator=torch.Generator().manual_seed(13 * step + rank)),)


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Any, ...]] = ids
    dtype: torch.dtype | None = torch.bfloat16  # of autocast; None: without
    cache: bool = True
    micro_batches: int = 1
    steps: int = 4  # messages: whole, a first look, known misfits, and a look after a pause
    fewer: float = 1.0  # most bytes, of those of float32, of reduce-scatters alone


CASES = {
    "bert": Case(bert, fewer=0.83),
    "llama": Case(llama, fewer=0.83),
    "resnet": Case(convolutions, pictures, fewer=0.57),
    "float32": Case(gpt2, dtype=None, fewer=1.02),
    "accumulated": Case(gpt2, micro_batches=2, fewer=1.02),
    "checkpointed": Case(checkpointed, fewer=0.83),
    "float16": Case(gpt2, dtype=torch.float16, steps=6, fewer=0.83),
    "without a cache": Case(gpt2, cache=False, fewer=0.83),
    "used twice": Case(Wide, lambda rank, step: (*rows(96)(rank, step), step), steps=6),
    "used twice, without a cache": Case(Wide, lambda rank, step: (*rows(96)(rank, step), step), cache=False, steps=6),
}


def train(rank: int, case: Case, wire: Any) -> tuple[list[float], list[Tensor], int]:
    """Return losses, weights, and bytes that were sent."""
    torch.manual_seed(7)
    ddp = DistributedDataParallel(case.model(), gradient_as_bucket_view=True, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    state = DearState(ddp, optimizer, DearConfig(wire=wire, lanes=2, slice_mb=0.25, atom_mb=1, fusion_mb=1))
    ddp.register_comm_hook(state, dear_hook)
    scaler = GradScaler("cpu", enabled=case.dtype == torch.float16)
    losses = []
    for step in range(case.steps):
        for micro_batch in range(case.micro_batches):
            last = micro_batch == case.micro_batches - 1
            with nullcontext() if last else ddp.no_sync():
                with torch.autocast("cpu", case.dtype, enabled=case.dtype is not None, cache_enabled=case.cache):
                    loss = ddp(*case.batch(rank, case.micro_batches * step + micro_batch))
                scaler.scale(loss).backward()
        losses.append(float(loss.detach()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    state.synchronize()
    weights = [parameter.detach().clone() for parameter in ddp.module.parameters()]
    sent = state._driver.lanes.traffic.sent_bytes
    state.close()
    return losses, weights, sent


def compare(rank: int, world_size: int, names: list[str], wire: str) -> dict[str, str]:
    """Return what is wrong, by case."""
    problems = {}
    for name in names:
        case = CASES[name]
        losses, weights, sent = train(rank, case, wire)
        expected_losses, expected, whole = train(rank, case, "float32")
        gathers = whole // 2  # gathers and reduce-scatters of float32 send as much
        fewer = (sent - gathers) / (whole - gathers)
        if losses != expected_losses or not all(map(torch.equal, weights, expected)):
            problems[name] = "other bits"
        elif not fewer <= case.fewer:
            problems[name] = f"{fewer:.3f} of the bytes"
        elif losses[0] == losses[-1]:
            problems[name] = "learns nothing"
    return problems


@pytest.mark.quick("3-auto")
@pytest.mark.parametrize(("world_size", "wire"), [(2, "exact"), (3, "auto")])
def test_same_bits(workers: WorkerPools, world_size: int, wire: str) -> None:
    assert workers(world_size).run(compare, list(CASES), wire) == [{}] * world_size


def compare_on_native_lanes(rank: int, world_size: int) -> tuple[dict[str, float], list[str]]:
    """With lanes that are streams: bytes of reduce-scatters, of those in float32, and errors."""
    native = property(lambda lanes: True, lambda lanes, value: None)
    fewer = {}
    with mock.patch.object(Lanes, "native", native, create=True):
        for name, dtype in (("autocast", torch.bfloat16), ("float32", None)):
            case = Case(Wide, lambda rank, step: (*rows(96)(rank, step), 0), dtype, steps=6)
            expected_losses, expected, whole = train(rank, case, "float32")
            losses, weights, sent = train(rank, case, "exact")
            assert losses == expected_losses and all(map(torch.equal, weights, expected)), name
            fewer[name] = 2 * sent / whole - 1  # gathers send as much as reduce-scatters of float32
            assert train(rank, case, "auto")[2] == whole, "16 bits are asked for on native lanes"
        messages = []
        change = Case(Wide, lambda rank, step: (*rows(96)(rank, step), LATE if step > 6 else 0))
        # A backward finds what the step before has lost; synchronize(), or close(), what the last step has.
        for steps, synchronize in ((9, DearState.synchronize), (8, DearState.synchronize), (8, mock.Mock())):
            replaced = mock.patch.object(DearState, "synchronize", synchronize)
            with replaced:
                messages.append(message_of(partial(train, rank, change._replace(steps=steps), "exact")))
    return fewer, messages


def test_native_lanes(workers: WorkerPools) -> None:
    """Two ranks, whose sums have the same bits in any order. The last of six steps sends 16 bits."""
    for fewer, messages in workers(2).run(compare_on_native_lanes):
        assert fewer["autocast"] < 0.97 and 1 <= fewer["float32"] < 1.01, fewer
        for message in messages:
            assert message.startswith("RuntimeError: gradients lost bits in the last step") and "later" in message
