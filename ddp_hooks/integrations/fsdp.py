"""Accelerators that shard models by FSDP2: every model that they prepare is extended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ddp_hooks.comm import see
from ddp_hooks.integrations.binding import replaced
from ddp_hooks.integrations.extended import ExtendedMethod
from ddp_hooks.intercept import NonCopyableHook
from fsdp_ext import ExtConfig, Extension, extend, restore

logger = logging.getLogger("ddp_hooks")

RESIDUALS = "fsdp_ext"
"""In a checkpoint: the folder of what gradients have lost so far."""


class FsdpAttachment:
    """What was attached to an accelerator with FSDP2; :func:`ddp_hooks.integrations.accelerate.attach` makes it."""

    def __init__(self, accelerator: Accelerator, config: ExtConfig) -> None:
        self.accelerator = accelerator
        self.bindings = Extensions(config)
        """Of the models that were prepared."""
        self.keeps_models = False
        self._undo = ExitStack()

    @property
    def is_active(self) -> bool:
        """Whether there are several processes."""
        return self.accelerator.num_processes > 1

    def stats(self) -> dict[str, float]:
        """Totals of this rank so far, of all models together: for ``accelerator.log``."""
        return self.bindings.stats()

    def synchronize(self) -> None:
        """Nothing to wait for: FSDP2 waits for parameters where they are read."""

    @contextmanager
    def complete(self, everywhere: bool = False) -> Iterator[None]:
        """FSDP2's checkpoints are complete."""
        yield

    def close(self) -> None:
        """Finish communication, and give models and the accelerator their own methods back; all ranks do it."""
        self.bindings.release()
        self._undo.close()

    def install(self) -> None:
        """Extend the accelerator."""
        accelerator = self.accelerator
        for name, extended in (("prepare", self._prepare), ("end_training", self._end_training)):
            self._undo.enter_context(replaced(accelerator, name, ExtendedMethod(accelerator, name, extended)))
        save = NonCopyableHook(lambda models, weights, folder: self.bindings.save(folder))
        load = NonCopyableHook(lambda models, folder: self.bindings.load(folder))
        self._undo.callback(accelerator.register_save_state_pre_hook(save).remove)
        self._undo.callback(accelerator.register_load_state_pre_hook(load).remove)

    def _prepare(self, original: Callable[..., Any], *objects: Any, **kwargs: Any) -> Any:
        prepared = original(*objects, **kwargs)
        for each in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
            self.bindings.extend(getattr(each, "_orig_mod", each))
        return prepared

    def _end_training(self, original: Callable[..., Any]) -> Any:
        self.bindings.release()  # before the process group is gone
        return original()


class Extensions:
    """All models of a loop that were extended, in the order in which they were prepared.

    Args:
        config: the settings of all of them.
    """

    def __init__(self, config: ExtConfig) -> None:
        self._config = config
        self._extended: dict[nn.Module, Extension] = {}

    def __iter__(self) -> Iterator[Any]:
        """Nothing: no optimizer is bound."""
        return iter(())

    def extend(self, prepared: object) -> None:
        """Extend what was prepared, if FSDP2 shards it. Collective."""
        if isinstance(prepared, nn.Module) and any(isinstance(module, FSDPModule) for module in prepared.modules()):
            self._extended[prepared] = extend(prepared, self._config)

    def release(self, but: nn.Module | None = None) -> None:
        """Finish communication, and forget all models, ``but`` one; all ranks do it."""
        for model in [model for model in self._extended if model is not but]:
            del self._extended[model]
            restore(model)

    def save(self, folder: str | Path, everywhere: bool = False) -> None:
        """Write what gradients have lost so far, if anything is kept of it. Collective."""
        for number, extension in enumerate(self._extended.values()):
            state = extension.state_dict()
            if state:
                dcp.save({"residuals": state}, checkpoint_id=_numbered(folder, number))

    def load(self, folder: str | Path) -> None:
        """The reverse of :meth:`save`. Collective."""
        for number, extension in enumerate(self._extended.values()):
            state, path = extension.state_dict(), _numbered(folder, number)
            if state and not path.exists():
                logger.warning("%s has nothing of what gradients had lost: training goes on without it", folder)
            elif state:
                dcp.load({"residuals": state}, checkpoint_id=path)
                extension.load_state_dict(state)
            elif path.exists():
                logger.warning("%s has what gradients had lost; these settings have no use for it", folder)

    def stats(self) -> dict[str, float]:
        """Sums over models, under names for logs."""
        found = [extension.stats() for extension in self._extended.values()]
        return {
            "ddp_hooks/stall_s": sum(stats.stall_s for stats in found),
            "ddp_hooks/sent_mb": sum(stats.sent_bytes for stats in found) / 2**20,
        }


def find_problem(accelerator: Accelerator) -> str | None:
    """Why models of this accelerator cannot be extended, or None."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return (
            "ExtConfig extends FSDP2, and this accelerator does not shard models: pass Trainer "
            "TrainingArguments(fsdp=True), or Accelerator a FullyShardedDataParallelPlugin(fsdp_version=2), which "
            "Accelerate heeds on accelerators only (on CPUs call fully_shard() and fsdp_ext.extend() in a loop of your "
            "own); for DistributedDataParallel give a DearConfig or a TopKConfig" + see("in-a-trainer")
        )
    version = getattr(accelerator.state.fsdp_plugin, "fsdp_version", None)
    if version != 2:
        return (
            f'ExtConfig extends FSDP2, and this accelerator trains with FSDP{version}: set "fsdp_version": 2 in '
            f"Trainer's fsdp_config, or FullyShardedDataParallelPlugin(fsdp_version=2){see('in-a-trainer')}"
        )
    if any(getattr(model, "_is_accelerate_prepared", False) for model in accelerator._models):
        return (
            f"this accelerator has prepared a model already: call attach() before accelerator.prepare()"
            f"{see('in-a-trainer')}"
        )
    return None


def _numbered(folder: str | Path, number: int) -> Path:
    return Path(folder) / (RESIDUALS if number == 0 else f"{RESIDUALS}_{number}")
