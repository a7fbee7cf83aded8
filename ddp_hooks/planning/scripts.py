"""A training script's step, profiled while the script runs, unchanged: it is stopped when enough is known."""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ddp_hooks.planning.profiling import StepWatch, refuse
from ddp_hooks.planning.step import StepProfile


class ScriptError(RuntimeError):
    """A script that does not train, or fails."""


class _Enough(BaseException):
    """Ends a script from within; no ``except Exception`` of its own stops it."""


class _Refused(BaseException):
    """Ends it because its steps cannot be profiled."""


def profile_script(
    script: Path, arguments: Sequence[str], steps: int, warmup: int
) -> tuple[StepProfile, nn.Module]:
    """Run a script as ``python script arguments`` does, until ``warmup + steps`` optimizer steps were seen.

    From the end of the warm-up on, DistributedDataParallel does not communicate: what the script trains is of no use.

    Returns:
        The profile, and what is trained.

    Raises:
        ScriptError: it ends or fails before, or its steps cannot be profiled.
    """
    if not script.is_file():
        raise ScriptError(f"there is no script {script}")
    session = _Session(steps, warmup)
    with _as_main(script, arguments), session:
        try:
            runpy.run_path(str(script), run_name="__main__")
        except _Enough:
            return session.profile()
        except _Refused as error:
            raise ScriptError(f"{script}: {error}") from None
        except SystemExit as error:
            reason = f"it called exit({error.code})"
        except Exception as error:
            reason = f"it failed: {type(error).__name__}: {error}\n{traceback.format_exc()}"
        else:
            reason = "it ended (processes that it starts by itself are not seen: use torchrun)"
    raise ScriptError(
        f"{script} took {session.seen} optimizer steps, and {session.needed} are needed (--warmup, --steps): {reason}"
    )


class _Session:
    """Finds out what a script trains, and watches some steps of it."""

    def __init__(self, steps: int, warmup: int) -> None:
        self.seen = 0
        self._steps = steps
        self._warmup = max(2, warmup)  # one to see what is trained, and one that is seen in part
        self._called: dict[int, nn.Module] = {}  # modules that were called with gradients on, the outer ones first
        self._optimizers: dict[Optimizer, None] = {}
        self._model: nn.Module | None = None
        self._watch: StepWatch | None = None
        self._stack = contextlib.ExitStack()

    @property
    def needed(self) -> int:
        """Steps of the optimizer in all."""
        return self._warmup + self._steps

    def __enter__(self) -> _Session:
        self._finding = register_module_forward_pre_hook(self._called_with)
        self._counting = register_optimizer_step_post_hook(self._stepped)
        return self

    def __exit__(self, *exception: object) -> None:
        self._finding.remove()
        self._counting.remove()
        self._stack.close()

    def profile(self) -> tuple[StepProfile, nn.Module]:
        """What was seen."""
        assert self._watch is not None and self._model is not None
        try:
            return self._watch.profile(), self._model
        except ValueError as error:
            raise ScriptError(str(error)) from None

    def _called_with(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled() and module.training:
            self._called.setdefault(id(module), module)
        if module is self._model:
            self._begin(module)

    def _begin(self, model: nn.Module) -> None:
        """Watch from here on; within the optimizer's hooks none may be added."""
        self._finding.remove()
        try:
            refuse(model)
        except ValueError as error:
            raise _Refused(str(error)) from None
        self._watch = self._stack.enter_context(StepWatch(model))
        self._watch.begin()
        self._counting.remove()
        self._counting = register_optimizer_step_post_hook(self._stepped)  # after the watch has seen a step's end

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizers.setdefault(optimizer)
        if optimizer is not next(iter(self._optimizers)):
            return
        self.seen += 1
        if self._watch is not None:
            self._watch.end(counts=self.seen > self._warmup)
            if len(self._watch) >= self._steps:
                raise _Enough
            self._watch.begin()
        elif self.seen >= self._warmup - 1:
            self._model = self._trained()

    def _trained(self) -> nn.Module:
        """The module that was called and holds what the optimizers train: DDP, or the outermost one."""
        own = {
            id(parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        }
        wrapped = [module for module in self._called.values() if isinstance(module, DistributedDataParallel)]
        for module in wrapped or self._called.values():
            if own <= {id(parameter) for parameter in module.parameters()}:
                return module
        kind = "DistributedDataParallel" if wrapped else "module"
        raise _Refused(
            f"no single {kind} that was called in training mode holds all parameters of the optimizers; several "
            f"models, losses with parameters of their own, and scripts that use a hook already, cannot be profiled"
        )


@contextlib.contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """What a script finds in ``sys``; and the process group outlives it, for what is measured next."""
    argv, path = sys.argv, list(sys.path)
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        with mock.patch.object(dist, "destroy_process_group", lambda group=None: None):
            yield
    finally:
        sys.argv, sys.path[:] = argv, path
