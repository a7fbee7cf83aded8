"""Other hooks around ``optimizer.step()``: they see what plain DDP's would, or are told what to do instead.

Prevents: clipping, in a hook that was registered after the state, by this rank's part of the norm or by nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_hooks import DearConfig, DearState, TopKConfig, TopKState, dear_hook, topk_hook
from ddp_hooks.intercept import around_step
from tests.support.messages import message_of
from tests.support.workers import WorkerPools

# -- the order, without communication -----------------------------------------------------------------------------


class TwoLevels(torch.optim.SGD):
    """torch runs step hooks for each level of this one."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.SGD, TwoLevels])
def test_ours_run_next_to_the_step_whenever_others_came(kind: type[torch.optim.Optimizer]) -> None:
    ran: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: ran.append(name)

    def both(name: str, register: Callable[..., Any], **options: Any) -> list[Any]:
        return list(register(optimizer, note(f"{name} before"), note(f"{name} after"), **options))

    def plain(optimizer: torch.optim.Optimizer, before: Any, after: Any) -> list[Any]:
        return [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]

    optimizer = kind([nn.Parameter(torch.zeros(1))])  # type: ignore[call-arg]
    other = kind([nn.Parameter(torch.zeros(1))])  # type: ignore[call-arg]
    both("earlier", plain)
    shown = both("shown", around_step, shows=True)
    both("state", around_step)
    both("tables", around_step)
    both("later", plain)
    before = [f"{name} before" for name in ("shown", "earlier", "later", "state", "tables")]
    after = [f"{name} after" for name in ("shown", "state", "tables", "earlier", "later")]
    levels = 2 if kind is TwoLevels else 1
    optimizer.step()
    assert ran == before * levels + after * levels
    for handle in shown:
        handle.remove()
    ran.clear()
    other.step()
    optimizer.step()
    assert ran == before[1:] * levels + after[1:] * levels


# -- between processes ----------------------------------------------------------------------------------------------


class Coupled(torch.optim.SGD):
    """Unknown to us, so that its gradients are there in whole inside of ``step()``."""


def trained(rank: int, kind: str, hook: Callable[..., Any] | None, steps: int = 4) -> tuple[Any, list[Tensor], str]:
    """The state, the parameters after some steps in float64, and what was raised.

    Args:
        kind: "plain", or which update or pipeline.
        hook: (optimizer, state), runs before each step; registered after the state.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    update, _, optimizer_kind = kind.partition(" ")
    optimizer = (Coupled if optimizer_kind else torch.optim.SGD)(ddp.parameters(), lr=0.1, momentum=0.5)
    state: Any = None
    if update == "forward":
        state = TopKState(ddp, TopKConfig(density=1.0, pipeline="forward", timeout_s=20), optimizer=optimizer)
        ddp.register_comm_hook(state, topk_hook)
    elif update != "plain":
        state = DearState(ddp, optimizer, DearConfig(update=update, timeout_s=20))  # type: ignore[arg-type]
        ddp.register_comm_hook(state, dear_hook)
    if hook is not None:
        optimizer.register_step_pre_hook(lambda chosen, *_: hook(chosen, state))
    message, values = "", [p.detach().clone() for p in ddp.parameters()]
    for step in range(steps):
        optimizer.zero_grad()
        ddp(torch.linspace(-1, 1 + rank + step, 12, dtype=torch.float64).view(2, 6)).square().mean().backward()
        message = message_of(optimizer.step)
        if state is not None:
            state.synchronize()
        if message != "nothing was raised":
            unchanged = all(torch.equal(p, value) for p, value in zip(ddp.parameters(), values, strict=True))
            return state, values, message if unchanged else f"changed, and {message}"
        values = [p.detach().clone() for p in ddp.parameters()]
    return state, values, message


def clip_with_torch(norms: list[float], optimizer: torch.optim.Optimizer, state: Any) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    norms.append(float(nn.utils.clip_grad_norm_(parameters, 0.05)))


def clip_with_state(norms: list[float], optimizer: torch.optim.Optimizer, state: Any) -> None:
    if state is None:
        clip_with_torch(norms, optimizer, state)
    elif isinstance(state, DearState):
        norms.append(float(state.clip_grad_norm_(0.05)))
    else:
        state.wait_for_gradients()
        clip_with_torch(norms, optimizer, state)


def count(seen: list[int], optimizer: torch.optim.Optimizer, state: Any) -> None:
    seen.append(len(seen) + len(optimizer.param_groups))


def hooks_around(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, hook in (("torch", clip_with_torch), ("state", clip_with_state), ("count", count)):
        sides = []
        for which in ("plain", kind):
            seen: list[Any] = []
            state, values, message = trained(rank, which, partial(hook, seen))
            sides.append((seen, values))
            if state is not None:
                state.close()
        (theirs, expected), (ours, values) = sides
        close = len(ours) == len(theirs) and torch.allclose(torch.tensor(ours), torch.tensor(theirs), rtol=1e-6)
        gap = max(float((a - b).abs().max()) for a, b in zip(values, expected, strict=True))
        found[name] = (message, close and gap < 1e-12)
    handle = register_optimizer_step_pre_hook(lambda chosen, *_: clip_with_torch([], chosen, None))
    state, _, found["global"] = trained(rank, kind, None)
    handle.remove()
    state.close()
    return found


@pytest.mark.parametrize("kind", ["sharded", "replicated", "replicated coupled", "forward", "forward coupled"])
def test_other_hooks_see_whole_gradients_or_guards(workers: WorkerPools, kind: str) -> None:
    fine = ("nothing was raised", True)
    for found in workers(2).run(hooks_around, kind):
        assert found["count"] == fine, found
        if kind == "replicated coupled":  # gradients are there for torch's functions, and no longer for the state's
            assert "inside of optimizer.step()" in found["state"][0], found
        else:
            assert found["state"] == fine, found
        if "coupled" in kind:
            assert found["torch"] == fine, found
        else:
            assert found["torch"][0].startswith("RuntimeError") and "clip" in found["torch"][0], found
        assert found["global"].startswith("RuntimeError") and "clip" in found["global"], found
