"""Accelerators that shard models by FSDP2: every model that they prepare is extended."""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ddp_hooks.integrations.hooked_models import HookedModels
from fsdp_ext import ExtConfig, Extension, extend, restore

logger = logging.getLogger("ddp_hooks")

RESIDUAL_FOLDER = "fsdp_ext"
"""Folder of a checkpoint: residuals of the models."""
TOO_LATE = "this accelerator has prepared a model already: call attach() before accelerator.prepare()"


class ExtendedModels(HookedModels):
    """All extended models of a loop, in the order of their preparation; none has a hook of DDP's."""

    def __init__(self, config: ExtConfig) -> None:
        super().__init__(None)
        self._config = config
        self._extended: dict[nn.Module, Extension] = {}

    def extend(self, prepared: object) -> None:
        """Extend a prepared object if it is a model that FSDP2 shards. Collective."""
        if isinstance(prepared, nn.Module) and any(isinstance(module, FSDPModule) for module in prepared.modules()):
            self._extended[prepared] = extend(prepared, self._config)

    def release(self, but: nn.Module | None = None) -> None:
        for model in [model for model in self._extended if model is not but]:
            del self._extended[model]
            restore(model)

    def save(self, folder: str | Path, everywhere: bool = False) -> None:
        """Write the residuals of gradients, if there are any. Collective."""
        for number, extension in enumerate(self._extended.values()):
            state = extension.state_dict()
            if state:
                dcp.save({"residuals": state}, checkpoint_id=_numbered(folder, number))

    def load(self, folder: str | Path) -> None:
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
