"""Hugging Face Accelerate: one line before ``prepare``.

accelerator = Accelerator()
attach(accelerator, DearConfig())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import see
from ddp_hooks.integrations.hooked_models import HookedModels, replaced, scaler_like
from ddp_hooks.integrations.settings import BUCKET_MB, Config, Dense, combination_of
from ddp_hooks.intercept import NonCopyableHook, clipping_of_frameworks
from fsdp_ext import ExtConfig, Extension, extend, restore

logger = logging.getLogger("ddp_hooks")

FSDP_FOLDER = "fsdp_ext"  # of a checkpoint: residuals of extended models
HAS_HOOK = (
    "has a communication hook already: pass attach() one configuration, or a list of configurations that go together"
)
_TOO_LATE = "this accelerator has prepared a model already: call attach() before accelerator.prepare()"
_INCOMPLETE = "ddp_hooks_incomplete"  # in a checkpoint's folder while it is written
_OTHER_ENGINES = {
    DistributedType.FSDP: "FSDP",
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}


def attach(accelerator: Accelerator, config: Config) -> Attachment:
    """Train all models that this accelerator prepares from now on with a communication hook.

    ``prepare`` wraps each model for its hook, and binds it to the optimizer of its parameters.
    ``accelerator.clip_grad_norm_``, ``clip_grad_value_``, ``save_state``, ``load_state``, ``accumulate``, ``no_sync``
    and the scaling of fp16's losses work as before. Only attributes of this accelerator change; a pickled copy has no
    hook. With one process there is nothing to do, which is logged.

    Args:
        accelerator: has prepared no model yet.
        config: a :class:`~ddp_hooks.DearConfig`, whose ``update="sharded"`` means ``"auto"`` here, a
            :class:`~ddp_hooks.TopKConfig` or a :class:`~ddp_hooks.QuantizedConfig`. Tables of a model step with its
            optimizer; make them by :func:`~ddp_hooks.shard_embeddings` before the optimizer. For tables without a hook:
            :class:`~ddp_hooks.integrations.Tables`. With FSDP2, a :class:`~fsdp_ext.ExtConfig`: every prepared model
            is extended.

    Raises:
        TypeError: ``config`` is no configuration.
        ValueError: parts of ``config`` exclude each other, or this accelerator.
    """
    dense, _, extension = combination_of(config)
    has_peers = accelerator.num_processes > 1
    problem = None
    if extension is None:
        problem = _problem_with_ddp(accelerator)
    elif has_peers:
        problem = _problem_with_fsdp(accelerator)
    if problem is not None:
        raise ValueError(f"{problem}{see('in-a-trainer')}")
    if not has_peers:
        logger.warning(
            "one process: there is nothing to communicate, so training goes on without a hook. Several are started by "
            "torchrun or accelerate launch"
        )
        return Attachment(accelerator, HookedModels(None))
    if extension is not None:
        return _ExtensionAttachment(accelerator, extension)
    return _HookAttachment(accelerator, dense)


def _problem_with_ddp(accelerator: Accelerator) -> str | None:
    engine = _OTHER_ENGINES.get(accelerator.distributed_type)
    if engine is not None:
        instead = ", or give an ExtConfig, which extends FSDP2" if engine == "FSDP" else ""
        return (
            f"these are hooks of DistributedDataParallel, and this accelerator trains with {engine}: launch without "
            f"it{instead}"
        )
    handler = accelerator.ddp_handler
    if isinstance(handler, HookedDdpKwargs):
        return f"this accelerator {HAS_HOOK}"
    if handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
        return (
            f"DistributedDataParallelKwargs(comm_hook={handler.comm_hook}) is a hook of its own, and DDP has one: "
            f"leave it out"
        )
    # Accelerate marks DDP around a model, but not that model itself, unless it only evaluates.
    if any(not getattr(model, "_is_accelerate_prepared", False) for model in accelerator._models):
        return _TOO_LATE
    return None


def _problem_with_fsdp(accelerator: Accelerator) -> str | None:
    if accelerator.distributed_type != DistributedType.FSDP:
        return (
            "ExtConfig extends FSDP2, and this accelerator does not shard models: pass Trainer "
            "TrainingArguments(fsdp=True), or Accelerator a FullyShardedDataParallelPlugin(fsdp_version=2), which "
            "Accelerate heeds on accelerators only (on CPUs call fully_shard() and fsdp_ext.extend() in a loop of your "
            "own); for DistributedDataParallel give a DearConfig, a TopKConfig or a QuantizedConfig"
        )
    version = getattr(accelerator.state.fsdp_plugin, "fsdp_version", None)
    if version != 2:
        return (
            f'ExtConfig extends FSDP2, and this accelerator trains with FSDP{version}: set "fsdp_version": 2 in '
            f"Trainer's fsdp_config, or FullyShardedDataParallelPlugin(fsdp_version=2)"
        )
    if any(getattr(model, "_is_accelerate_prepared", False) for model in accelerator._models):
        return _TOO_LATE
    return None


@dataclass
class HookedDdpKwargs(DistributedDataParallelKwargs):
    """Settings of DDP for hooks. The hook itself is registered when the optimizer is known."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as plain settings: a copy of the accelerator has no hook."""
        return DistributedDataParallelKwargs, (), vars(self)


class Attachment:
    """Handle of the changes to an accelerator; :func:`attach` makes it."""

    def __init__(self, accelerator: Accelerator, hooked_models: HookedModels) -> None:
        self.accelerator = accelerator
        self.hooked_models = hooked_models
        """Models that were prepared with their optimizers, or with FSDP2, in the order of preparation."""
        self.keeps_models = False
        """True if prepared models train on after ``free_memory``, as in a Trainer."""
        self._undo = ExitStack()  # gives the accelerator its own attributes back

    def stats(self) -> dict[str, float]:
        """Return statistics of this rank, summed over models: of the last step; with FSDP2 since the beginning."""
        return self.hooked_models.stats()

    def synchronize(self) -> None:
        """Wait until parameters hold their new values, for C++ code and other processes that read them."""
        self.hooked_models.synchronize()

    def close(self) -> None:
        """End communication, and give the accelerator its own methods back; all ranks call it."""
        self.hooked_models.release()
        self._undo.close()

    def _extend(self, **functions: Callable[..., Any]) -> None:
        """Call ``function(former method, ...)`` in the place of each method."""
        for name, function in functions.items():
            method = _ExtendedMethod(self.accelerator, name, function)
            self._undo.enter_context(replaced(self.accelerator, name, method))

    def _end_training(self, original: Callable[..., Any]) -> Any:
        self.hooked_models.release()  # before the process group is gone
        return original()


class _ExtendedModels(HookedModels):
    """Models that FSDP2 shards and :func:`fsdp_ext.extend` extends; none has a hook of DDP's."""

    def __init__(self) -> None:
        super().__init__(None)
        self.extended: dict[nn.Module, Extension] = {}

    def release(self, but: nn.Module | None = None) -> None:
        for model in [model for model in self.extended if model is not but]:
            del self.extended[model]
            restore(model)

    def save(self, folder: str | Path, everywhere: bool = False) -> None:
        for path, extension in self._paths(folder):
            state = extension.state_dict()
            if state:
                dcp.save({"residuals": state}, checkpoint_id=path)

    def load(self, folder: str | Path) -> None:
        for path, extension in self._paths(folder):
            state = extension.state_dict()
            if state and not path.exists():
                logger.warning("%s has no residuals of gradients: they begin with zero", folder)
            elif state:
                dcp.load({"residuals": state}, checkpoint_id=path)
                extension.load_state_dict(state)
            elif path.exists():
                logger.warning("%s has residuals of gradients, and these settings use none: they are dropped", folder)

    def _paths(self, folder: str | Path) -> Iterator[tuple[Path, Extension]]:
        for number, extension in enumerate(self.extended.values()):
            yield Path(folder) / (FSDP_FOLDER if number == 0 else f"{FSDP_FOLDER}_{number}"), extension

    def stats(self) -> dict[str, float]:
        found = [extension.stats() for extension in self.extended.values()]
        return {
            "ddp_hooks/stall_s": sum(stats.stall_s for stats in found),
            "ddp_hooks/sent_mb": sum(stats.sent_bytes for stats in found) / 2**20,
        }


class _ExtensionAttachment(Attachment):
    """Methods of an accelerator around its own, for models that FSDP2 shards."""

    def __init__(self, accelerator: Accelerator, config: ExtConfig) -> None:
        models = _ExtendedModels()
        super().__init__(accelerator, models)
        self._config, self._extended = config, models.extended
        self._extend(prepare=self._prepare, end_training=self._end_training)
        save = NonCopyableHook(lambda _, weights, folder: models.save(folder))
        load = NonCopyableHook(lambda _, folder: models.load(folder))
        self._undo.callback(accelerator.register_save_state_pre_hook(save).remove)
        self._undo.callback(accelerator.register_load_state_pre_hook(load).remove)

    def _prepare(self, original: Callable[..., Any], *objects: Any, **kwargs: Any) -> Any:
        prepared = original(*objects, **kwargs)
        for each in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
            model = getattr(each, "_orig_mod", each)  # compiled or not
            if isinstance(model, nn.Module) and any(isinstance(module, FSDPModule) for module in model.modules()):
                self._extended[model] = extend(model, self._config)
        return prepared


class _HookAttachment(Attachment):
    """Methods of an accelerator around its own, for models with DDP's hooks."""

    def __init__(self, accelerator: Accelerator, dense: Dense | None) -> None:
        super().__init__(accelerator, HookedModels(dense))
        clipping_of_frameworks["Accelerate"] = "accelerator.clip_grad_norm_(...)"
        self._undo.enter_context(replaced(accelerator, "ddp_handler", self._ddp_settings()))
        if accelerator.scaler is not None:
            self._undo.enter_context(replaced(accelerator, "scaler", scaler_like(accelerator.scaler)))
        self._undo.callback(accelerator.register_save_state_pre_hook(NonCopyableHook(self._begin_checkpoint)).remove)
        self._extend(
            prepare_model=self._prepare_model,
            prepare_optimizer=self._prepare_optimizer,
            clip_grad_norm_=self._clip_grad_norm,
            clip_grad_value_=self._clip_grad_value,
            save_state=self._save_state,
            load_state=self._load_state,
            get_state_dict=self._get_state_dict,
            free_memory=self._free_memory,
            end_training=self._end_training,
        )

    def _ddp_settings(self) -> HookedDdpKwargs:
        former = self.accelerator.ddp_handler
        settings = HookedDdpKwargs(**vars(former)) if former is not None else HookedDdpKwargs()
        settings.gradient_as_bucket_view = True
        if self.hooked_models.dense is not None and settings.bucket_cap_mb == HookedDdpKwargs.bucket_cap_mb:
            settings.bucket_cap_mb = BUCKET_MB
        return settings

    def _prepare_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prepared = original(*args, **kwargs)
        ddp = getattr(prepared, "_orig_mod", prepared)  # compiled or not
        if isinstance(ddp, DistributedDataParallel):
            self.hooked_models.expect(ddp)
            self._bind()
        return prepared

    def _prepare_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prepared = original(*args, **kwargs)
        self._bind()
        return prepared

    def _bind(self) -> None:
        wrapper_of = {_unwrapped(prepared): prepared for prepared in self.accelerator._optimizers}
        for model in self.hooked_models.bind(wrapper_of, self.accelerator.scaler):
            prepared, optimizer = wrapper_of[model.optimizer], model.optimizer
            if prepared.scaler is not None:  # it has kept the former step(), and would restore it
                prepared._optimizer_original_step_method = optimizer.step
                prepared._optimizer_patched_step_method = patch_optimizer_step(prepared, optimizer.step)

    def _free_memory(self, original: Callable[..., Any], *objects: Any) -> Any:
        if not self.keeps_models:
            self.hooked_models.release()
        return original(*objects)

    # -- gradients --------------------------------------------------------------------------------------------------

    def _clip_grad_norm(
        self, original: Callable[..., Any], parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Any:
        return self.hooked_models.clip_grad_norm(self._ready_for("clip_grad_norm_", parameters), max_norm, norm_type)

    def _clip_grad_value(
        self, original: Callable[..., Any], parameters: Iterable[Tensor] | Tensor, clip_value: float
    ) -> None:
        self.hooked_models.clip_grad_value(self._ready_for("clip_grad_value_", parameters), clip_value)

    def _ready_for(self, name: str, parameters: Iterable[Tensor] | Tensor) -> list[Tensor]:
        if not self.accelerator.sync_gradients and any(model.dear is not None for model in self.hooked_models):
            raise RuntimeError(
                f"{name}() was called while every rank accumulates gradients of its own: write "
                f"`if accelerator.sync_gradients:` before it{see('in-a-trainer')}"
            )
        self.accelerator.unscale_gradients()
        return [parameters] if isinstance(parameters, Tensor) else list(parameters)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def _get_state_dict(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.hooked_models.model_state(lambda: original(*args, **kwargs))

    def _save_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        everywhere = self.accelerator.project_configuration.save_on_each_node
        with self.hooked_models.complete(everywhere):
            folder = original(*args, **kwargs)
            self.hooked_models.save(folder, everywhere)
        self.accelerator.wait_for_everyone()
        if self._writes:
            (Path(folder) / _INCOMPLETE).unlink()
        self.accelerator.wait_for_everyone()  # whoever returns finds a complete checkpoint
        return folder

    @property
    def _writes(self) -> bool:
        """True if this process writes the files that are equal on all ranks."""
        accelerator = self.accelerator
        everywhere = accelerator.project_configuration.save_on_each_node
        return bool(accelerator.is_local_main_process if everywhere else accelerator.is_main_process)

    def _begin_checkpoint(self, models: Any, weights: Any, folder: str) -> None:
        if self._writes:
            (Path(folder) / _INCOMPLETE).touch()

    def _load_state(
        self, original: Callable[..., Any], input_dir: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if input_dir is None and not self.accelerator.project_configuration.automatic_checkpoint_naming:
            original(None, *args, **kwargs)  # raises, naming the missing argument
        folder = Path(input_dir).expanduser() if input_dir is not None else self._latest_complete()
        if (folder / _INCOMPLETE).exists():
            raise ValueError(
                f"{folder} was not written to its end, perhaps because a process was killed: load an earlier one"
                f"{see('in-a-trainer')}"
            )
        self.hooked_models.consolidate_tables(everywhere=True)  # Accelerate compares the file with state_dict()
        original(str(folder), *args, **kwargs)
        self.hooked_models.load(folder)

    def _latest_complete(self) -> Path:
        folders = (Path(self.accelerator.project_dir) / "checkpoints").glob("checkpoint_*")
        newest_first = sorted(folders, key=lambda folder: int(folder.name.rpartition("_")[2]), reverse=True)
        for folder in newest_first:
            if not (folder / _INCOMPLETE).exists():
                return folder
            logger.warning("%s was not written to its end, so it is not loaded", folder)
        raise ValueError(f"there is no complete checkpoint in {self.accelerator.project_dir}{see('in-a-trainer')}")


class _ExtendedMethod:
    """Method of one instance; copies and pickles of the instance get the method of its class."""

    def __init__(self, instance: object, name: str, function: Callable[..., Any]) -> None:
        self._instance, self._name, self._function = instance, name, function
        self._original = getattr(instance, name)
        update_wrapper(self, self._original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._original, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._instance, self._name)


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
