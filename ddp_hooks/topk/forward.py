"""``pipeline="forward"``: sums arrive in the next forward, and each parameter is updated just before it is read.

Both zhang2023dear (section VII) and zhao2024spardl (section VI) leave it as future work to join the two. Groups are
submitted in the backward as ever. When it ends, guards take the place of gradients that are still on their way;
``optimizer.step()`` notes its settings; and in the next forward modules wait for the groups of their own parameters
only, which the optimizer's code then updates. Before the forward ends everything is there, because the coming backward
writes into the same buckets.

Nothing communicates here, so one rank alone may wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import Recorder, Work, see, torch_compat
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


class Reduced(Protocol):
    """A backward whose groups are on their way; :class:`~ddp_hooks.TopKState` knows more about it."""

    @property
    def works(self) -> Sequence[Work]:
        """Of the groups, in their order."""

    def approve(self) -> bool:
        """Whether every rank may update with it: waits until all have said so. Collective."""

    def arrived(self, parameters: Sequence[int]) -> None:
        """The groups of these parameters are complete, and nobody has read their gradients yet."""

    def landed(self) -> None:
        """All groups are complete, and their parameters are updated."""

    def bring_home(self) -> None:
        """Wait for everything: gradients are those that the other pipeline leaves."""

    def conclude(self) -> None:
        """They take the place of their guards; collective."""


@dataclass
class _Pending:
    """Gradients between a backward and the updates."""

    reduced: Reduced
    gradients: dict[int, Tensor]  # by parameter: what DDP has put there, in its buckets


class ForwardPipeline:
    """Lets gradients arrive, and updates happen, in the next forward.

    Args:
        ddp: the model.
        optimizer: of all its parameters.
        parameters, names: those that DDP reduces, in a fixed order.
        recorder: for the timeline.
        deferred: whether the optimizer updates each parameter by itself; if not, ``step()`` waits for everything.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        recorder: Recorder,
        deferred: bool,
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._deferred = deferred
        self._guards = [
            GradientGuard.standing_for(parameter, name, _on_its_way)
            for parameter, name in zip(parameters, names, strict=True)
        ]
        self._held: _Pending | None = None  # from the end of a backward until a step
        self._flying: _Pending | None = None  # from a step until everything is updated
        self._wanted: set[int] = set()  # parameters that await their update
        self._marks = SuspendedGuards(parameters)  # of them, while the optimizer's own code runs
        self._zeroed: set[int] = set()  # of them, those whose gradients were set to zero before the step
        self._updates = DeferredUpdates(optimizer, parameters, self._gradient_of, self._finish_updates)
        self._pipe = FeedPipe(ddp.module, parameters, recorder, self._arrived)
        self._handles = self._install(ddp)

    @property
    def stall_s(self) -> float:
        """Seconds that forwards have waited so far."""
        return self._pipe.stall.seconds

    @property
    def is_holding(self) -> bool:
        """Whether a backward has not been followed by a step yet."""
        return self._held is not None

    def refuse_unfinished(self) -> None:
        """Raise if a backward begins while gradients of the one before are on their way, in the same buckets."""
        if self._held is not None or self._flying is not None:
            raise RuntimeError(
                "a backward follows a forward that has gone around DDP's hooks, so gradients of the step before are "
                f"still on their way: call ddp(...), not ddp.forward(...){see('late-gradients')}"
            )

    def plan(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Set which parameters travel together; nothing may be on its way."""
        self._pipe.plan(groups)

    def hold(self, reduced: Reduced) -> None:
        """A backward has ended, and DDP has made its buckets the model's gradients: nobody may read them yet."""
        gradients = {i: p.grad for i, p in enumerate(self._parameters) if p.grad is not None}
        self._held = _Pending(reduced, gradients)
        for index in gradients:
            self._guards[index].zeroed = False
            self._parameters[index].grad = self._guards[index]

    def settle(self) -> None:
        """Wait for the gradients of the last backward, so that they may be read or changed; collective.

        The next ``optimizer.step()`` then updates at once.
        """
        self.finish()
        held, self._held = self._held, None
        if held is not None:
            held.reduced.bring_home()
            self._give_back(held)
            held.reduced.conclude()

    def _finish_updates(self) -> None:
        self._pipe.finish()

    def finish(self) -> None:
        """Wait for the updates that are on their way."""
        self._pipe.finish(on_host=True)
        self._land()

    def close(self) -> None:
        """Wait for what is on its way, and remove hooks and guards."""
        self._marks.put_back()
        try:
            self.settle()
        finally:
            self._pipe.close()
            for handle in self._handles:
                handle.remove()
            for parameter in self._parameters:
                if isinstance(parameter.grad, GradientGuard):
                    parameter.grad = None

    # -- the optimizer's step ---------------------------------------------------------------------------------------

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if self._updates.running or torch_compat.is_inner_step(optimizer):
            return None
        if torch_compat.inside_compiled_region():
            raise RuntimeError(
                "optimizer.step() was called from compiled code, which cannot leave updates to the next forward: "
                f"compile the model alone, and call optimizer.step() outside{see('how-step-is-called')}"
            )
        replaced = torch_compat.with_closure(args, kwargs, self._settling)
        if replaced is None:
            self._open_step()
        return replaced

    def _settling(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate_and_settle() -> Any:
            loss = closure()
            self.settle()
            return loss

        return evaluate_and_settle

    def _open_step(self) -> None:
        self._marks.put_back()  # one that did not end
        self.finish()  # two steps without a forward between them
        held = self._held
        if held is None:
            return
        if not self._deferred or not held.reduced.approve():
            self.settle()
            return
        self._updates.note_settings()
        self._wanted = {index for index in held.gradients if self._parameters[index].grad is self._guards[index]}
        self._zeroed = {index for index in self._wanted if self._guards[index].zeroed}
        self._marks.take(self._wanted)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._updates.running or torch_compat.is_inner_step(optimizer) or self._held is None:
            return
        self._flying, self._held = self._held, None
        self._marks.put_back()
        torch_compat.increment_versions(self._parameters)
        self._pipe.launched(self._flying.reduced.works)

    # -- arrival ----------------------------------------------------------------------------------------------------

    def _arrived(self, parameters: Sequence[int]) -> None:
        assert self._flying is not None
        self._flying.reduced.arrived(parameters)
        wanted = [index for index in parameters if index in self._wanted]
        self._wanted.difference_update(wanted)
        if wanted:
            self._updates.run(wanted)

    def _gradient_of(self, index: int) -> Tensor:
        assert self._flying is not None
        gradient = self._flying.gradients[index]
        return torch.zeros_like(gradient) if index in self._zeroed else gradient.view_as(gradient)

    def _land(self) -> None:
        if self._flying is not None and not self._pipe.in_flight:
            flying, self._flying = self._flying, None
            self._give_back(flying)
            flying.reduced.landed()

    def _give_back(self, pending: _Pending) -> None:
        """Gradients take the place of their guards, where the user has left these."""
        left = [i for i in pending.gradients if self._parameters[i].grad is self._guards[i]]
        for index in left:
            gradient = pending.gradients[index]
            self._parameters[index].grad = gradient.zero_() if self._guards[index].zeroed else gradient
        for co_optimizer in co_optimizers.co_optimizers_of(self._optimizer) if left else []:
            co_optimizer.on_grads_restored()

    # -- forwards ---------------------------------------------------------------------------------------------------

    def _before_forward(self, ddp: Any, *_: Any) -> None:
        if not torch.is_grad_enabled():
            self._pipe.begin_forward(training=False)
            return
        self._marks.put_back()  # one that did not end
        if self._held is not None:
            self.settle()  # a backward that no step has followed leaves its gradients to the next one
        if any(parameter.grad is guard for parameter, guard in zip(self._parameters, self._guards, strict=True)):
            self.finish()  # nobody has taken the last gradients away, so the coming ones are added to them
        self._pipe.begin_forward(training=False)  # groups travel in the order of the backward

    def _after_forward(self, ddp: Any, args: Any, output: Any) -> None:
        self._pipe.end_forward()
        self.finish()

    def _install(self, ddp: DistributedDataParallel) -> list[Any]:
        def finish(*_: Any) -> None:
            self.finish()

        optimizer = self._optimizer
        handles: list[Any] = [
            *around_step(
                optimizer,
                NonCopyableHook(self._before_step),
                NonCopyableHook(self._after_step),
                shows=not self._deferred,
            ),
            optimizer.register_state_dict_pre_hook(finish),
            optimizer.register_load_state_dict_pre_hook(finish),
            ddp.register_forward_pre_hook(NonCopyableHook(self._before_forward)),
            ddp.register_forward_hook(NonCopyableHook(self._after_forward), always_call=True),
        ]
        handles += refuse_assigned_parameters(ddp, self._parameters)
        handles.append(extend_zero_grad(optimizer, self._marks.zero))
        handles.append(when_step_fails(optimizer, self._marks.put_back))
        return handles


def _on_its_way(what: str) -> str:
    reason = 'TopKConfig(pipeline="forward") lets it arrive in the next forward'
    if "non_finite_check" in what:
        return f'Use pipeline="backward", because a gradient scaler reads gradients before the step: {reason}'
    return (
        "To clip, read or change gradients: state.wait_for_gradients() first, on all ranks, after every backward (or "
        f'pipeline="backward", which is as fast where that happens in every step). It is still on its way: {reason}'
    )
