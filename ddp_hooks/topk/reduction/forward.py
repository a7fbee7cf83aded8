"""``pipeline="forward"``: sums arrive in the next forward, and each parameter is updated just before it is read.

zhang2023dear (section VII) and zhao2024spardl (section VI) leave this combination as future work.

1. Backward: groups are submitted as ever. At its end guards take the place of gradients that are still on their way.
2. ``optimizer.step()`` notes its settings.
3. Next forward: modules wait for the groups of their own parameters, which the optimizer's code then updates. Before it
   ends everything has arrived, because the coming backward writes into the same buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_hooks.comm import see
from ddp_hooks.comm.torch_compat.compiler import inside_compiled_region
from ddp_hooks.comm.torch_compat.optimizer import is_inner_step, with_closure
from ddp_hooks.intercept import (
    GradientGuard,
    NonCopyableHook,
    SuspendedGuards,
    around_step,
    co_optimizers,
    extend_zero_grad,
    refuse_assigned_parameters,
    when_step_fails,
)
from ddp_hooks.overlap import DeferredUpdates, FeedPipe
from ddp_hooks.topk.reduction.backward import Backward, Phase
from ddp_hooks.topk.reduction.groups import Context
from ddp_hooks.topk.reduction.steps import Steps


class ForwardPipeline:
    """Lets gradients arrive, and updates happen, in the next forward.

    ``deferred``: the optimizer updates each parameter by itself; otherwise ``step()`` waits for everything.
    """

    def __init__(self, context: Context, optimizer: torch.optim.Optimizer, deferred: bool, steps: Steps) -> None:
        self._optimizer = optimizer
        self._parameters = parameters = context.parameters
        self._deferred = deferred
        self._steps = steps
        pairs = zip(parameters, context.names, strict=True)
        self._guards = [GradientGuard.standing_for(parameter, name, _on_its_way) for parameter, name in pairs]
        self._pending: Backward | None = None  # from its end until everything is updated
        self._gradients: dict[int, Tensor] = {}  # of it, by parameter: where DDP has put it, in its buckets
        self._wanted: set[int] = set()  # parameters that await their update
        self._zeroed: set[int] = set()  # of them, parameters whose gradients were set to zero before the step
        self._aside = SuspendedGuards(parameters)  # guards of them, while the optimizer's own code runs
        self._updates = DeferredUpdates(optimizer, parameters, self._gradient_of, lambda: self._pipe.finish())
        self._pipe = FeedPipe(context.ddp.module, parameters, context.recorder, self._arrived)
        steps.stalls.append(self._pipe.stall)
        ddp, wait = context.ddp, lambda *_: self.wait_for_updates()
        hooks = NonCopyableHook(self._before_step), NonCopyableHook(self._after_step)
        self._handles: list[Any] = [
            *around_step(optimizer, *hooks, shows=not deferred),
            optimizer.register_state_dict_pre_hook(wait),
            optimizer.register_load_state_dict_pre_hook(wait),
            ddp.register_forward_pre_hook(NonCopyableHook(self._before_forward)),
            ddp.register_forward_hook(NonCopyableHook(self._after_forward), always_call=True),
            *refuse_assigned_parameters(ddp, parameters),
            extend_zero_grad(optimizer, self._aside.zero),
            when_step_fails(optimizer, self._aside.put_back),
        ]

    @property
    def held(self) -> Backward | None:
        """The last backward, if no step has followed it yet."""
        pending = self._pending
        return pending if pending is not None and pending.phase is not Phase.UPDATING else None

    def refuse_unfinished(self) -> None:
        """Raise if a backward begins while gradients of the last one are on their way, in the same buckets."""
        if self._pending is not None:
            raise RuntimeError(
                "a backward follows a forward that has gone around DDP's hooks, so gradients of the step before are "
                f"still on their way: call ddp(...), not ddp.forward(...){see('late-gradients')}"
            )

    def hold(self, backward: Backward) -> None:
        """Put guards in place of the gradients of a backward, which DDP has just made the model's."""
        self._pending = backward
        self._pipe.plan([group.members for group in backward.groups])
        self._gradients = {i: p.grad for i, p in enumerate(self._parameters) if p.grad is not None}
        for index in self._gradients:
            self._guards[index].zeroed = False
            self._parameters[index].grad = self._guards[index]

    def wait_for_gradients(self) -> None:
        """Wait for the gradients of the last backward, so that they may be read or changed; collective."""
        self.wait_for_updates()
        held = self.held
        if held is not None:
            self._pending = None
            held.wait_all()
            self._replace_guards()
            self._steps.finish(held)

    def wait_for_updates(self) -> None:
        self._pipe.finish(on_host=True)
        pending = self._pending
        if pending is not None and pending.phase is Phase.UPDATING and not self._pipe.in_flight:
            self._pending = None
            self._replace_guards()
            self._steps.note_cost(pending)

    def close(self) -> None:
        self._aside.put_back()
        try:
            self.wait_for_gradients()
        finally:
            self._pipe.close()
            for handle in self._handles:
                handle.remove()
            for parameter in self._parameters:
                if isinstance(parameter.grad, GradientGuard):
                    parameter.grad = None

    # -- the optimizer's step ---------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._updates.running or is_inner_step(optimizer):
            return None
        if inside_compiled_region():
            raise RuntimeError(
                "optimizer.step() was called from compiled code, which cannot leave updates to the next forward: "
                f"compile the model alone, and call optimizer.step() outside{see('how-step-is-called')}"
            )
        replaced = with_closure(args, kwargs, self._waiting_closure)
        if replaced is None:
            self._begin_step()
        return replaced

    def _waiting_closure(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate_and_wait() -> Any:
            loss = closure()
            self.wait_for_gradients()
            return loss

        return evaluate_and_wait

    def _begin_step(self) -> None:
        self._aside.put_back()  # of a step that did not end
        self.wait_for_updates()  # two steps without a forward between them
        held = self.held
        if held is None:
            return
        if not self._deferred or not self._steps.approve(held):
            self.wait_for_gradients()
            return
        self._updates.note_settings()
        self._wanted = {index for index in self._gradients if self._parameters[index].grad is self._guards[index]}
        self._zeroed = {index for index in self._wanted if self._guards[index].zeroed}
        self._aside.take(self._wanted)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._updates.running or is_inner_step(optimizer):
            return
        pending = self._pending
        if pending is None or pending.phase is not Phase.APPROVED:
            return
        pending.phase = Phase.UPDATING
        self._aside.put_back()
        torch.autograd.graph.increment_version(self._parameters)
        self._pipe.launched(pending.works)

    # -- arrival ----------------------------------------------------------------------------------------------------

    def _arrived(self, parameters: Sequence[int]) -> None:
        """Update parameters whose groups are complete, before anybody reads them."""
        assert self._pending is not None
        self._pending.restore_unused(parameters)
        wanted = [index for index in parameters if index in self._wanted]
        self._wanted.difference_update(wanted)
        if wanted:
            self._updates.run(wanted)

    def _gradient_of(self, index: int) -> Tensor:
        gradient = self._gradients[index]
        return torch.zeros_like(gradient) if index in self._zeroed else gradient.view_as(gradient)

    def _replace_guards(self) -> None:
        """Put gradients in place of the guards that the user has left there."""
        gradients, self._gradients = self._gradients, {}
        left = [i for i in gradients if self._parameters[i].grad is self._guards[i]]
        for index in left:
            gradient = gradients[index]
            self._parameters[index].grad = gradient.zero_() if self._guards[index].zeroed else gradient
        for co_optimizer in co_optimizers.co_optimizers_of(self._optimizer) if left else []:
            co_optimizer.on_grads_restored()

    # -- forwards ---------------------------------------------------------------------------------------------------

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._aside.put_back()  # of a step that did not end
            if self.held is not None:
                self.wait_for_gradients()  # no step has followed, so its gradients count in the next one
            if any(parameter.grad is guard for parameter, guard in zip(self._parameters, self._guards, strict=True)):
                self.wait_for_updates()  # nobody has zeroed the last gradients, so the coming ones are added to them
        self._pipe.begin_forward(training=False)  # groups travel in the order of the backward

    def _after_forward(self, *_: Any) -> None:
        self._pipe.end_forward()
        self.wait_for_updates()


def _on_its_way(what: str) -> str:
    reason = 'TopKConfig(pipeline="forward") lets it arrive in the next forward'
    if "non_finite_check" in what:
        return f'Use pipeline="backward", because a gradient scaler reads gradients before the step: {reason}'
    return (
        "To clip, read or change gradients: state.wait_for_gradients() first, on all ranks, after every backward (or "
        f'pipeline="backward", which is as fast where that happens in every step). It is still on its way: {reason}'
    )
