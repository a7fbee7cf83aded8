"""Accelerators that shard models by FSDP2: every model that they prepare is extended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ddp_hooks.integrations.patches import ExtendedMethod, replaced
from ddp_hooks.intercept import NonCopyableHook
from fsdp_ext import ExtConfig, Extension, extend, restore

logger = logging.getLogger("ddp_hooks")

RESIDUAL_FOLDER = "fsdp_ext"
"""Folder of a checkpoint: residuals of the models."""
TOO_LATE = "this accelerator has prepared a model already: call attach() before accelerator.prepare()"


class ExtendedModels:
    """All extended models of a loop, in the order of their preparation."""

    def __init__(self, config: ExtConfig) -> None:
        self._config = config
        self._extended: dict[nn.Module, Extension] = {}

    def __iter__(self) -> Iterator[Any]:
        """Return no models: none is bound to an optimizer."""
        return iter(())

    def extend(self, prepared: object) -> None:
        """Extend a prepared object if it is a model that FSDP2 shards. Collective."""
        if isinstance(prepared, nn.Module) and any(isinstance(module, FSDPModule) for module in prepared.modules()):
            self._extended[prepared] = extend(prepared, self._config)

    def release(self, but: nn.Module | None = None) -> None:
        """End communication and forget all models, ``but`` one; all ranks call it."""
        for model in [model for model in self._extended if model is not but]:
            del self._extended[model]
            restore(model)

    def synchronize(self) -> None:
        """Return at once: FSDP2 waits for parameters where they are read."""

    def complete(self, everywhere: bool = False) -> AbstractContextManager[None]:
        """Return an empty context: FSDP2's checkpoints are complete."""
        return nullcontext()

    def save(self, folder: str | Path, everywhere: bool = False) -> None:
        """Write the residuals of gradients, if there are any. Collective."""
        for number, extension in enumerate(self._extended.values()):
            state = extension.state_dict()
            if state:
                dcp.save({"residuals": state}, checkpoint_id=_numbered(folder, number))

    def load(self, folder: str | Path) -> None:
        """Read the files of :meth:`save`. Collective."""
        for number, extension in enumerate(self._extended.values()):
            state, path = extension.state_dict(), _numbered(folder, number)
            if state and not path.exists():
                logger.warning("%s has no residuals of gradients: they begin with zero", folder)
            elif state:
                dcp.load({"residuals": state}, checkpoint_id=path)
                extension.load_state_dict(state)
            elif path.exists():
                logger.warning("%s has residuals of gradients, and these settings use none: they are dropped", folder)

    def stats(self) -> dict[str, float]:
        """Return sums over models since the beginning, under names for logs."""
        found = [extension.stats() for extension in self._extended.values()]
        return {
            "ddp_hooks/stall_s": sum(stats.stall_s for stats in found),
            "ddp_hooks/sent_mb": sum(stats.sent_bytes for stats in found) / 2**20,
        }


def install_extension(accelerator: Accelerator, models: ExtendedModels, undo: ExitStack) -> None:
    """Let an accelerator extend the models that it prepares, and save their residuals, until ``undo`` is closed."""

    def prepare(original: Callable[..., Any], *objects: Any, **kwargs: Any) -> Any:
        prepared = original(*objects, **kwargs)
        for each in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
            models.extend(getattr(each, "_orig_mod", each))
        return prepared

    def end_training(original: Callable[..., Any]) -> Any:
        models.release()  # before the process group is gone
        return original()

    for name, function in (("prepare", prepare), ("end_training", end_training)):
        undo.enter_context(replaced(accelerator, name, ExtendedMethod(accelerator, name, function)))
    save = NonCopyableHook(lambda _, weights, folder: models.save(folder))
    load = NonCopyableHook(lambda _, folder: models.load(folder))
    undo.callback(accelerator.register_save_state_pre_hook(save).remove)
    undo.callback(accelerator.register_load_state_pre_hook(load).remove)


def find_problem(accelerator: Accelerator) -> str | None:
    """Return why models of this accelerator cannot be extended, or None."""
    if accelerator.distributed_type != DistributedType.FSDP:
        return (
            "ExtConfig extends FSDP2, and this accelerator does not shard models: pass Trainer "
            "TrainingArguments(fsdp=True), or Accelerator a FullyShardedDataParallelPlugin(fsdp_version=2), which "
            "Accelerate heeds on accelerators only (on CPUs call fully_shard() and fsdp_ext.extend() in a loop of your "
            "own); for DistributedDataParallel give a DearConfig or a TopKConfig"
        )
    version = getattr(accelerator.state.fsdp_plugin, "fsdp_version", None)
    if version != 2:
        return (
            f'ExtConfig extends FSDP2, and this accelerator trains with FSDP{version}: set "fsdp_version": 2 in '
            f"Trainer's fsdp_config, or FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if any(getattr(model, "_is_accelerate_prepared", False) for model in accelerator._models):
        return TOO_LATE
    return None


def _numbered(folder: str | Path, number: int) -> Path:
    return Path(folder) / (RESIDUAL_FOLDER if number == 0 else f"{RESIDUAL_FOLDER}_{number}")
