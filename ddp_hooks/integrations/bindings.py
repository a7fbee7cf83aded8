"""All models of a loop: which of them have their optimizer, and what is done with all of them together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import see, torch_compat
from ddp_hooks.dear import clip_grad_norm_
from ddp_hooks.integrations.binding import Binding, tables_of
from ddp_hooks.integrations.settings import Dense
from ddp_hooks.topk import TopKConfig


class Bindings:
    """Models that a loop has wrapped, bound to their optimizers as soon as these are known.

    Args:
        dense: the hook's settings; None: DDP's own all-reduce, beside tables.
    """

    def __init__(self, dense: Dense | None) -> None:
        self._dense = dense
        self._bound: list[Binding] = []
        self._waiting: dict[DistributedDataParallel, Any] = {}  # models whose optimizer is missing, with their guards

    def __iter__(self) -> Iterator[Binding]:
        return iter(self._bound)

    def expect(self, ddp: DistributedDataParallel) -> None:
        """A model has been wrapped; training it before :meth:`bind` is an error."""
        if ddp not in self._waiting and all(binding.ddp is not ddp for binding in self._bound):
            self._waiting[ddp] = ddp.register_forward_pre_hook(_refuse_without_optimizer)

    def bind(
        self, optimizers: Iterable[torch.optim.Optimizer], scaler: torch.amp.GradScaler | None = None
    ) -> list[Binding]:
        """Bind models that have all their parameters in one of these optimizers; returns the new ones. Collective."""
        made = []
        for ddp, guard in list(self._waiting.items()):
            optimizer = self._optimizer_of(ddp, list(optimizers))
            if optimizer is not None:
                made.append(Binding(ddp, optimizer, self._dense, scaler))
                guard.remove()
                del self._waiting[ddp]
        self._bound += made
        return made

    def _optimizer_of(
        self, ddp: DistributedDataParallel, optimizers: Sequence[torch.optim.Optimizer]
    ) -> torch.optim.Optimizer | None:
        """The one that holds all parameters of a model; with hooks that leave optimizers alone the first with some."""
        wanted = {id(parameter) for parameter in torch_compat.managed_parameters(ddp).values()}
        alone = isinstance(self._dense, TopKConfig) and self._dense.pipeline == "backward"
        takes_any = alone and tables_of(ddp.module) is None
        for optimizer in optimizers:
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            if wanted <= held or (takes_any and wanted & held):
                return optimizer
        return None

    def of(self, optimizer: torch.optim.Optimizer) -> list[Binding]:
        """Those of an optimizer's models."""
        return [binding for binding in self._bound if binding.optimizer is optimizer]

    def release(self, but: nn.Module | None = None) -> None:
        """Finish communication, and forget all models, ``but`` one; all ranks do it."""
        for ddp in [ddp for ddp in self._waiting if ddp.module is not but]:
            self._waiting.pop(ddp).remove()
        for binding in [binding for binding in self._bound if binding.ddp.module is not but]:
            self._bound.remove(binding)
            binding.close()

    def finish(self) -> None:
        """Finish communication; what was trained can still be saved. All ranks do it."""
        for binding in self._bound:
            binding.finish()

    # -- together ---------------------------------------------------------------------------------------------------

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0, **how: Any) -> Any:
        """Clip the common norm of gradients; None, and nothing done, if no model here has one of them. Collective."""
        rest = list(parameters)
        sources: list[Any] = []
        for binding in self._bound:
            own = [parameter for parameter in rest if binding.owns(parameter)]
            if own:
                sources += binding.sources(own)
                rest = [parameter for parameter in rest if not binding.owns(parameter)]
        return clip_grad_norm_([*sources, rest], max_norm, norm_type, **how).float() if sources else None

    def clip_grad_value(self, parameters: Iterable[Tensor], clip_value: float) -> list[Tensor]:
        """Clamp gradients of models here; returns the parameters that belong to none. All ranks do it."""
        rest = list(parameters)
        for binding in self._bound:
            own = [parameter for parameter in rest if binding.owns(parameter)]
            if own:
                binding.clip_grad_value_(own, clip_value)
                rest = [parameter for parameter in rest if not binding.owns(parameter)]
        return rest

    @contextmanager
    def complete(self, everywhere: bool = False) -> Iterator[None]:
        """:meth:`Binding.complete` of all."""
        with ExitStack() as stack:
            for binding in self._bound:
                stack.enter_context(binding.complete(everywhere))
            yield

    def save(self, folder: str | Path, everywhere: bool = False) -> None:
        """:meth:`Binding.save` of all, each under its own number but for the first."""
        for number, binding in enumerate(self._bound):
            binding.save(_numbered(folder, number), everywhere)

    def load(self, folder: str | Path) -> None:
        """:meth:`Binding.load` of all."""
        for number, binding in enumerate(self._bound):
            binding.load(_numbered(folder, number))

    def synchronize(self) -> None:
        """Wait until parameters hold their new values. Communicates nothing."""
        for binding in self._bound:
            for state in (binding.dear, binding.topk):
                if state is not None:
                    state.synchronize()

    def stats(self) -> dict[str, float]:
        """Sums of what :meth:`Binding.stats` says, under names for logs."""
        total: dict[str, float] = {}
        for binding in self._bound:
            for name, value in binding.stats().items():
                total[f"ddp_hooks/{name}"] = total.get(f"ddp_hooks/{name}", 0.0) + value
        return total


def _numbered(folder: str | Path, number: int) -> Path:
    return Path(folder) if number == 0 else Path(folder) / f"ddp_hooks_{number}"


def _refuse_without_optimizer(module: nn.Module, *_: Any) -> None:
    if module.training and torch.is_grad_enabled():
        raise RuntimeError(
            f"this model was prepared, but no single optimizer with all of its trained parameters, which hooks and "
            f"tables step with: prepare (or set up) one optimizer of model.parameters(), with several param_groups if "
            f"need be{see('in-a-trainer')}"
        )
