"""Measurements: fits that find the line, profiles that leave the model as it was, and links of real processes."""

from __future__ import annotations

import copy
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import AlphaBeta
from ddp_hooks.comm.wire.exact import BLOCK, fitting_part
from ddp_hooks.planning import Network, StepProfile, TensorUse, fit_link, measure, profile_step, slowest_of
from ddp_hooks.planning.events import Link
from ddp_hooks.planning.measurement import profiling
from ddp_hooks.planning.measurement.processor import RankTime, total_seconds
from ddp_hooks.planning.measurement.profiling import StepWatch
from tests.support.workers import WorkerPools

# -- fits --------------------------------------------------------------------------------------------------------------


@given(st.floats(1e-6, 1e-2), st.floats(1e-10, 1e-6))
def test_a_line_is_found(alpha_s: float, beta_s: float) -> None:
    fit = fit_link({size: alpha_s + beta_s * size for size in (1 << 10, 1 << 15, 1 << 20, 1 << 22)})
    assert fit.link.alpha_s == pytest.approx(alpha_s, rel=1e-3)
    assert fit.link.beta_s_per_byte == pytest.approx(beta_s, rel=1e-3)
    assert fit.error < 1e-3 and fit.burst_credit_s <= 1e-3 * alpha_s


def test_noise_shows_as_error() -> None:
    clean = {size: 1e-4 + 1e-8 * size for size in (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22)}
    noisy = {size: seconds * (1.2 if index % 2 else 0.9) for index, (size, seconds) in enumerate(clean.items())}
    fit = fit_link(noisy)
    assert 0.05 < fit.error < 0.5
    assert fit.link.beta_s_per_byte == pytest.approx(1e-8, rel=0.3)
    assert "off by" in str(fit)


def test_nothing_is_below_zero() -> None:
    falling = fit_link({1000: 4.0, 2000: 3.0, 4000: 2.0, 8000: 1.0})
    assert falling.link.beta_s_per_byte == 0 and falling.link.alpha_s > 0
    steep = fit_link({1000: 0.5, 2000: 2.0, 4000: 5.0, 8000: 11.0})
    assert steep.link.alpha_s == 0 and steep.link.beta_s_per_byte > 0


def test_bursts_do_not_bend_the_line() -> None:
    """A link that lets the first 300 KB of whatever follows a pause through at once."""
    sizes = (1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 20, 1 << 22)
    fit = fit_link({size: max(5e-4 + 1e-10 * size, 1e-8 * (size - 3e4)) for size in sizes})
    assert fit.link.beta_s_per_byte == pytest.approx(1e-8, rel=0.03)
    assert 1e-4 < fit.link.alpha_s < 6e-4


@pytest.mark.parametrize("credit", [0.0, 0.5, 1.0])
def test_what_a_link_makes_up_for_is_found(credit: float) -> None:
    """Messages of which the large ones take less than their latency and their bytes, as simulated in a row."""
    sizes = (1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 20, 1 << 22)
    alpha_s, beta_s = 2e-3, 4e-9
    wires = {size: Link(AlphaBeta(alpha_s, beta_s), credit * alpha_s) for size in sizes}
    fit = fit_link({size: wire.send(0.0, size, 1000) / 1000 for size, wire in wires.items()})
    assert fit.burst_credit_s == pytest.approx(credit * alpha_s, rel=0.08, abs=1e-6)
    assert fit.link.alpha_s == pytest.approx(alpha_s, rel=0.05) and fit.link.beta_s_per_byte == pytest.approx(beta_s)
    assert fit.network(4) == Network(4, fit.link, burst_credit_s=fit.burst_credit_s)


def test_few_sizes_have_no_error() -> None:
    with pytest.raises(ValueError, match="four sizes or more"):
        fit_link({1: 1.0, 2: 2.0, 4: 4.0})


def test_interrupts_that_nobody_was_charged_with_count() -> None:
    def ranks(*own_s: float, busy_s: float, interrupts_s: float, host: str = "a") -> list[RankTime]:
        return [RankTime(host, each_s, busy_s, interrupts_s) for each_s in own_s]

    assert total_seconds(ranks(1.0, 2.0, busy_s=3.5, interrupts_s=0.8)) == pytest.approx(3.5)
    assert total_seconds(ranks(1.0, 2.0, busy_s=3.0, interrupts_s=0.8)) == 3.0, "ranks were charged with them"
    assert total_seconds(ranks(1.0, 2.0, busy_s=9.0, interrupts_s=0.8)) == 3.8, "another program computes"
    assert total_seconds(ranks(1.0, 2.0, busy_s=0.0, interrupts_s=0.0)) == 3.0, "the kernel does not tell"
    two_hosts = ranks(1.0, busy_s=1.5, interrupts_s=0.5) + ranks(2.0, busy_s=2.25, interrupts_s=1.0, host="b")
    assert total_seconds(two_hosts) == pytest.approx(1.5 + 2.25)


# -- profiles ----------------------------------------------------------------------------------------------------------


class Sleeper(nn.Module):
    """A layer that takes its time."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.seconds = forward_s, backward_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds[0])
        y = x * self.weight
        y.register_hook(lambda _: time.sleep(self.seconds[1]))
        return y


class Two(nn.Module):
    """Two of them, a frozen weight, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Sleeper(0.01, 0.03), Sleeper(0.02, 0.04)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"logits": self.norm(self.second(self.first(x))) * self.frozen}


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(3, 4))["logits"].pow(2).sum().backward()
    optimizer.step()


def test_a_profile_is_of_the_step_and_changes_nothing() -> None:
    model = Two()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    profile = profile_step(model, partial(train, model, optimizer))
    use = {tensor.name: tensor for tensor in profile.tensors}
    assert sorted(use) == ["first.weight", "norm.bias", "norm.weight", "second.weight"]
    assert use["first.weight"].needed_s + 0.01 <= use["second.weight"].needed_s <= profile.forward_s - 0.02
    assert use["norm.weight"].ready_s + 0.04 <= use["second.weight"].ready_s
    assert use["second.weight"].ready_s + 0.03 <= use["first.weight"].ready_s <= profile.backward_s
    assert profile.optimizer_s > 0 and use["first.weight"].num_bytes == 16 and profile.element_bytes == 4
    for now, then in zip((model.state_dict(), optimizer.state_dict()["state"]), (before[0], before[1]["state"])):  # noqa: B905
        torch.testing.assert_close(now, then, rtol=0, atol=0)
    assert all(parameter.grad is gradients[name] for name, parameter in model.named_parameters())
    assert not model._forward_pre_hooks and not model.first._forward_pre_hooks


def test_closures_and_several_optimizers_update_only_once() -> None:
    """Forward and backward within ``step(closure)`` are no update, and other optimizers' updates are added."""
    model = Two()
    optimizer = torch.optim.SGD([model.first.weight, model.second.weight], lr=0.1)
    other = torch.optim.SGD(model.norm.parameters(), lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.randn(3, 4))["logits"].sum()
        loss.backward()
        return float(loss.detach())

    def step() -> None:
        optimizer.step(closure)
        other.step()

    profile = profile_step(model, step)
    assert profile.forward_s >= 0.03 and profile.backward_s >= 0.07
    assert profile.optimizer_s < profile.forward_s, "the closure takes at least 0.1 s"


def test_everything_that_steps_is_given_back() -> None:
    model, loss = Two(), nn.Linear(4, 1)
    optimizer = torch.optim.AdamW([*model.parameters(), *loss.parameters()])
    state = {"exp_avg": torch.ones(4, dtype=torch.float64), "exp_avg_sq": torch.ones(4), "step": torch.tensor(3.0)}
    optimizer.state[model.frozen] = dict(state)  # gets no gradient
    before, random = copy.deepcopy(loss.state_dict()), torch.get_rng_state()

    def step() -> None:
        loss(model(torch.randn(3, 4))["logits"]).sum().backward()
        optimizer.step()

    profile_step(model, step, steps=1)
    torch.testing.assert_close(loss.state_dict(), before, rtol=0, atol=0)
    assert set(optimizer.state) == {model.frozen}
    assert optimizer.state[model.frozen]["exp_avg"].dtype == torch.float64
    torch.testing.assert_close(optimizer.state[model.frozen], state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)


def test_unused_parameters_come_last_and_sparse_ones_are_refused() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    model.forward = lambda x: model["a"](x)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    profile = profile_step(model, step)
    use = {tensor.name: tensor for tensor in profile.tensors}
    assert use["b.weight"].ready_s == profile.backward_s and use["b.weight"].num_bytes == 64
    table = nn.Embedding(8, 4, sparse=True)
    sgd = torch.optim.SGD(table.parameters(), lr=0.1)

    def look_up() -> None:
        table(torch.tensor([1])).sum().backward()
        sgd.step()

    with pytest.raises(ValueError, match="gradients of weight are sparse"):
        profile_step(table, look_up)


def test_blocks_of_16_bit_numbers_are_counted() -> None:
    values = torch.ones(4 * BLOCK + 1)
    values[[0, 1, 2 * BLOCK]] = 1 + 2**-8  # in two of five blocks; float16 has two bits more
    assert fitting_part(values, torch.bfloat16) == pytest.approx(3 / 5)
    assert fitting_part(values.view(-1, 1), torch.float16) == 1
    assert fitting_part(values * 2**20, torch.float16) == 0, "too large"


class Words(nn.Module):
    """A table, a matrix that autocast reads in 16 bits, and one that it leaves alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.matrix, self.last = nn.Embedding(8, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.matrix(self.table(x)).float()
        with torch.autocast("cpu", enabled=False):
            return self.last(y)


@pytest.mark.parametrize(("narrow", "micro_batches", "casts"), [
    (torch.bfloat16, 1, ["matrix.weight", "matrix.bias"]),
    (torch.float16, 1, []),
    (torch.bfloat16, 3, []),  # sums need more bits
    (torch.float32, 1, []),
])  # fmt: skip
def test_gradients_of_16_bits_are_found(narrow: torch.dtype, micro_batches: int, casts: list[str]) -> None:
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(micro_batches):
            with torch.autocast("cpu", narrow, enabled=narrow != torch.float32):
                output = model(torch.randperm(8))
            F.mse_loss(output, torch.randn(8, 64)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)  # makes them other numbers
        optimizer.step()

    use = {tensor.name: tensor for tensor in profile_step(model, step, 1).tensors}
    assert [name for name in use if use[name].is_cast] == casts, "tables are read as they are"
    expected = 0.5 if narrow != torch.float32 and micro_batches == 1 else 1.0
    assert [use[f"{name}.weight"].exact_width for name in ("table", "matrix", "last")] == [expected, expected, 1.0]


def test_a_tensor_fits_if_it_does_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def profile(forward_s: float, *tensors: tuple[float, bool]) -> StepProfile:
        uses = (TensorUse(f"tensor {i}", 4, 0.0, 0.0, *bits) for i, bits in enumerate(tensors))
        return StepProfile(tuple(uses), forward_s, 1.0)

    ranks = [profile(2.0, (0.5, True), (0.5, True)), profile(1.0, (0.5, True), (0.75, False))]
    monkeypatch.setattr(profiling, "gather", lambda own, group: ranks)
    assert slowest_of(ranks[1], None) == profile(2.0, (0.5, True), (0.75, False))


def test_another_model_is_noticed() -> None:
    model, other = Two(), Two()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="train nothing of this model"):
        profile_step(model, partial(train, other, optimizer))


# -- real processes ----------------------------------------------------------------------------------------------------


def measure_all(rank: int, world_size: int) -> tuple[Any, StepProfile, bool]:
    seen: list[str] = []

    def progress(parts: Any) -> Any:
        for part in parts:
            seen.append(part)
            yield part

    group = dist.group.WORLD
    assert group is not None
    found = measure(group, torch.device("cpu"), progress)
    ddp = DistributedDataParallel(Two())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    torch.manual_seed(rank)
    weights = copy.deepcopy(ddp.module.state_dict())
    profile = slowest_of(profile_step(ddp, partial(train, ddp, optimizer)), group)
    same = all(torch.equal(value, ddp.module.state_dict()[name]) for name, value in weights.items())
    return (found, seen), profile, same


@pytest.mark.slow
def test_real_processes_agree(workers: WorkerPools) -> None:
    outcomes = workers(2).run(measure_all)
    (found, seen), profile, _ = outcomes[0]
    assert seen == ["link", "all-reduce", "messages", "copies", "selection"]
    assert found.fit.link.beta_s_per_byte > 0 and len(found.fit.seconds) == 6
    costs = found.costs
    assert min(costs.message_s, costs.copy_s_per_byte, costs.select_s_per_byte) > 0
    assert min(costs.exact_s_per_byte, costs.code_s_per_byte) > 0
    assert costs.all_reduce >= 1 and costs.cores >= 1 and costs.python == costs.oversubscription >= 1
    for (other, _), other_profile, same in outcomes:
        assert other == found, "every rank has the same"
        assert other_profile == profile and same
    assert {tensor.name for tensor in profile.tensors} == {"first.weight", "norm.bias", "norm.weight", "second.weight"}


def count_reductions(rank: int, world_size: int) -> list[int]:
    """All-reduces of a loop that accumulates, watched and not."""
    ddp = DistributedDataParallel(Two())
    counted = [0]

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        counted[0] += 1
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
    ddp.register_comm_hook(None, hook)

    def accumulate() -> None:
        with ddp.no_sync():
            ddp(torch.randn(3, 4))["logits"].sum().backward()
        ddp.require_backward_grad_sync = True  # as some loops have it
        ddp(torch.randn(3, 4))["logits"].sum().backward()

    found = []
    with StepWatch(ddp) as watch:
        watch.begin()
        accumulate()
        watch.end()
        found.append(counted[0])
    accumulate()
    return [*found, counted[0]]


def test_nothing_is_sent_while_a_step_is_watched(workers: WorkerPools) -> None:
    for watched, afterwards in workers(2).run(count_reductions):
        assert watched == 0 and afterwards > 0


def alone(rank: int, world_size: int) -> str:
    group = dist.group.WORLD
    assert group is not None
    try:
        measure(group, torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return ""


def test_one_rank_has_no_link(workers: WorkerPools) -> None:
    assert "one rank has no link to measure" in workers(1).run(alone)[0]
