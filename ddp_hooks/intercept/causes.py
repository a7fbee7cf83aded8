"""Gradients that were not reduced: their causes, told from the forwards, the model and its hook, and steps refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NoReturn, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_hooks.comm import see
from ddp_hooks.comm.torch_compat.ddp import comm_hook_registered, ignored_parameter_names, shortened, sparse_parameters
from ddp_hooks.comm.torch_compat.optimizer import with_closure
from ddp_hooks.intercept.guards import ONE_BACKWARD, GradientGuard
from ddp_hooks.intercept.module_hooks import NonCopyableHook

LatestForward: TypeAlias = Literal["none", "no_sync", "synchronised"]
"""The last forward through DDP's hooks since the last reduced backward, as far as it recorded gradients."""


def why_not_reduced(
    ddp: DistributedDataParallel,
    parameters: Sequence[Tensor],
    names: Sequence[str],
    without: Sequence[str],
    latest: LatestForward,
    state: str,
    hook: str,
    change: str | None = None,
) -> str:
    """Return the remedy and the cause; several causes where the facts do not tell which one it is.

    ``without`` names parameters to which the last backward gave no gradient; ``state`` and ``hook`` are names of the
    state's class and of its hook; ``change`` says how users may change gradients (None: no code can have set one).
    """
    if not comm_hook_registered(ddp):
        return f"the hook is missing: call ddp.register_comm_hook(state, {hook}) after creating {state}"
    changed = _changed_since(ddp, parameters, names)
    if changed is not None:
        return changed
    if latest == "no_sync":
        return "leave no_sync() before the last micro-batch of a step: the last forward ran under no_sync()"
    reduced = any(isinstance(parameter.grad, GradientGuard) for parameter in parameters)  # by the last backward
    if change is not None and reduced:
        return f"{change}: something other than the last backward through ddp(...) has set .grad"
    if latest == "synchronised" and without:
        return f"{remedy_for_unused(ddp)}: the last backward gave no gradient to {shortened(without)}"
    causes = [ONE_BACKWARD]
    if latest == "synchronised":
        causes.append(f"{remedy_for_unused(ddp)}, if the last backward gave some parameters no gradient")
    if change is not None:
        causes.append(f"{change}, if code has set .grad")
    return "; or ".join(causes)


def why_not_ended(
    ddp: DistributedDataParallel, parameters: Sequence[Tensor], names: Sequence[str], missing: Sequence[str]
) -> str:
    """Return why DDP has not handed over the buckets of ``missing`` in a backward."""
    return _changed_since(ddp, parameters, names) or (
        f"{remedy_for_unused(ddp)}: the last backward ended without gradients for {shortened(missing)} or "
        "parameters of the same bucket. If it ended with an exception, wrap the model again"
    )


def refuse_unended(
    ddp: DistributedDataParallel, parameters: Sequence[Tensor], names: Sequence[str], missing: Sequence[str]
) -> NoReturn:
    """Raise at a forward after a backward that did not end; DDP has not handed over gradients of ``missing``."""
    if not missing:
        raise RuntimeError(
            "the last backward ended with an error in its exchange: wrap the model again"
            f"{see('a-backward-did-not-end')}"
        )
    cause = why_not_ended(ddp, parameters, names, missing)
    raise RuntimeError(f"gradients were not reduced over the ranks: {cause}{see('a-backward-did-not-end')}")


def remedy_for_unused(ddp: DistributedDataParallel) -> str:
    if ddp.static_graph:
        return (
            "pass find_unused_parameters=True to DistributedDataParallel in the place of static_graph=True, which "
            "needs the same parameters in every backward, at first those of all that the model returns"
        )
    if ddp.find_unused_parameters:
        return "return tensors, or tuples, lists or dicts of them, from the model, in which DDP finds what was used"
    return "pass find_unused_parameters=True to DistributedDataParallel"


def _changed_since(ddp: DistributedDataParallel, parameters: Sequence[Tensor], names: Sequence[str]) -> str | None:
    """Return how the trained parameters differ from those that the state was made for; None if they do not."""
    ignored = ignored_parameter_names(ddp)
    present = dict(ddp.module.named_parameters())
    known = {id(parameter) for parameter in parameters}
    left = {id(parameter) for parameter in sparse_parameters(ddp).values()}  # perhaps to another hook
    added = [
        name
        for name, parameter in present.items()
        if parameter.requires_grad and name not in ignored and id(parameter) not in known | left
    ]
    if added:
        return (
            f"{shortened(added)} was added, thawed or parametrised after the model was wrapped in "
            "DistributedDataParallel, which does not reduce it: do so before wrapping"
        )
    frozen = [name for name, parameter in zip(names, parameters, strict=True) if not parameter.requires_grad]
    if frozen and not ddp.find_unused_parameters:
        return (
            f"{shortened(frozen)} was frozen after the model was wrapped in DistributedDataParallel, "
            "which waits for its gradient: freeze it before wrapping, or pass find_unused_parameters=True"
        )
    return None


class LocalGradients:
    """Refuses steps with gradients of this rank alone, which DDP has not reduced.

    DDP reduces the first backward after each forward outside of ``no_sync()``. Any other backward adds this rank's
    gradients to ``.grad``, and plain DDP lets every rank step in a direction of its own, without a word.

    DDP hands over its last bucket when every gradient of a backward is in place. So a parameter that autograd has
    written since then holds a gradient of this rank alone. (A hook costs 0.7 us for each parameter and backward.)
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        parameters: Sequence[torch.nn.Parameter],
        names: Sequence[str],
        state: str,
        hook: str,
    ) -> None:
        self._ddp = cast(DistributedDataParallel, weakref.proxy(ddp))
        self._parameters = parameters
        self._names = names
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._users = state, hook  # names of the state's class and of its hook, for messages
        self._written: set[int] = set()  # parameters with gradients that are not reduced yet
        self._latest: LatestForward = "none"
        reference = weakref.ref(self)  # torch and the model keep hooks for as long as nobody removes them
        handles: list[Any] = [
            ddp.register_forward_pre_hook(NonCopyableHook(_calling(reference, LocalGradients._before_forward))),
            register_optimizer_step_pre_hook(_calling(reference, LocalGradients._before_step)),
            *(p.register_post_accumulate_grad_hook(_adding(i, self._written)) for i, p in enumerate(parameters)),
        ]
        self.close = weakref.finalize(self, _remove, handles)

    @property
    def written(self) -> Collection[int]:
        """Parameters to which backwards have given gradients since the last one that DDP has reduced: a live view."""
        return self._written

    def all_reduced(self) -> None:
        """DDP has handed over all buckets of a backward."""
        self._written.clear()
        self._latest = "none"

    def _before_forward(self, *_: Any) -> None:
        if torch.is_grad_enabled():
            self._latest = "synchronised" if self._ddp.require_backward_grad_sync else "no_sync"

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        def checking(closure: Callable[[], Any]) -> Callable[[], Any]:
            def evaluate() -> Any:
                loss = closure()
                self._refuse(optimizer)
                return loss

            return evaluate

        replaced = with_closure(args, kwargs, checking)
        if replaced is None:
            self._refuse(optimizer)
        return replaced

    def _refuse(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._written:
            return
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            index = self._index_of.get(id(parameter))
            if index in self._written and _has_values(parameter.grad):
                without = [name for number, name in enumerate(self._names) if number not in self._written]
                cause = why_not_reduced(self._ddp, self._parameters, self._names, without, self._latest, *self._users)
                raise RuntimeError(
                    f"the gradient of {self._names[index]} was not reduced over the ranks: {cause}. To drop it, call "
                    f"zero_grad(){see('gradients-were-not-reduced')}"
                )


def _calling(reference: weakref.ref[LocalGradients], method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        present = reference()
        return method(present, *args) if present is not None else None

    return call


def _adding(index: int, written: set[int]) -> Callable[[Tensor], None]:
    add = written.add
    return lambda _: add(index)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _has_values(gradient: Tensor | None) -> bool:
    if gradient is None or isinstance(gradient, GradientGuard):
        return False
    return bool((gradient.coalesce().values() if gradient.is_sparse else gradient).any())
