"""Profile of a training script's step: the script runs unchanged, and is stopped when enough is known."""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ddp_hooks.planning.measurement.profiling import StepWatch, refuse
from ddp_hooks.planning.step import StepProfile


class _Stop(BaseException):
    """Ends a script from within; no ``except Exception`` of its own catches it. A reason: it cannot be profiled."""


def profile_script(script: Path, arguments: Sequence[str], steps: int, warmup: int) -> tuple[StepProfile, nn.Module]:
    """Run a script as ``python script arguments`` does, until ``warmup + steps`` optimizer steps were seen.

    From the end of the warm-up on, DistributedDataParallel does not communicate: the script's result is of no use.
    Returns the profile, and the model that the script trains. Raises ValueError if it ends or fails too soon, or if its
    steps cannot be profiled.
    """
    if not script.is_file():
        raise ValueError(f"there is no script {script}")
    session = _Session(steps, warmup)
    with (
        mock.patch.object(sys, "argv", [str(script), *arguments]),
        mock.patch.object(sys, "path", [str(script.resolve().parent), *sys.path]),
        mock.patch.object(dist, "destroy_process_group", lambda group=None: None),  # measurements follow
        session,
    ):
        try:
            runpy.run_path(str(script), run_name="__main__")
        except _Stop as stop:
            if stop.args:
                raise ValueError(f"{script}: {stop}") from None
            assert session.watch is not None and session.model is not None
            return session.watch.profile(), session.model
        except SystemExit as error:
            reason = f"it called exit({error.code})"
        except Exception as error:
            reason = f"it failed: {type(error).__name__}: {error}\n{traceback.format_exc()}"
        else:
            reason = "it ended (processes that it starts by itself are not seen: use torchrun)"
    raise ValueError(
        f"{script} took {session.seen} optimizer steps, and {session.needed} are needed (--warmup, --steps): {reason}"
    )


class _Session:
    """Find the model that a script trains, and watch some of its steps."""

    def __init__(self, steps: int, warmup: int) -> None:
        self._warmup = max(2, warmup)  # the first shows what is trained, the second is seen in part
        self.seen = 0  # optimizer steps
        self.needed = self._warmup + steps
        self._called: dict[int, nn.Module] = {}  # modules called with gradients on, the outer ones first
        self._optimizers: dict[Optimizer, None] = {}
        self.model: nn.Module | None = None
        self.watch: StepWatch | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Session:
        self._finding = register_module_forward_pre_hook(self._on_call)
        self._counting = register_optimizer_step_post_hook(self._on_step)
        return self

    def __exit__(self, *exception: object) -> None:
        self._finding.remove()
        self._counting.remove()
        self._stack.close()

    def _on_call(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self._called.setdefault(id(module), module)
        if module is self.model:
            self._begin(module)

    def _begin(self, model: nn.Module) -> None:
        """Watch from here on; within the optimizer's hooks no hook may be added."""
        self._finding.remove()
        try:
            refuse(model)
        except ValueError as error:
            raise _Stop(str(error)) from None
        self.watch = self._stack.enter_context(StepWatch(model))
        self.watch.begin()
        self._counting.remove()
        self._counting = register_optimizer_step_post_hook(self._on_step)  # after the watch's own hook

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers.setdefault(optimizer)
        if optimizer is not next(iter(self._optimizers)):
            return
        self.seen += 1
        if self.watch is not None:
            self.watch.end(counts=self.seen > self._warmup)
            if len(self.watch) >= self.needed - self._warmup:
                raise _Stop
            self.watch.begin()
        elif self.seen >= self._warmup - 1:
            self.model = self._find_model()

    def _find_model(self) -> nn.Module:
        """Return the called module that holds everything that the optimizers train: DDP, or the outermost one."""
        groups = (group["params"] for optimizer in self._optimizers for group in optimizer.param_groups)
        trained = {id(parameter) for parameter in chain.from_iterable(groups) if parameter.requires_grad}
        wrapped = [module for module in self._called.values() if isinstance(module, DistributedDataParallel)]
        for module in wrapped or self._called.values():
            if trained <= {id(parameter) for parameter in module.parameters()}:
                return module
        kind = "DistributedDataParallel" if wrapped else "module"
        raise _Stop(
            f"no single {kind} that was called in training mode holds all parameters of the optimizers; several "
            f"models, losses with parameters of their own, and scripts that use a hook already, cannot be profiled"
        )
