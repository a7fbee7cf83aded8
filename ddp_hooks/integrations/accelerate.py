"""Hugging Face Accelerate: one line before ``prepare``.

    accelerator = Accelerator()
    attach(accelerator, DearConfig())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer, patch_optimizer_step
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs, DistributedType
from torch import Tensor, nn

from ddp_hooks.comm import see
from ddp_hooks.dear import GradScaler
from ddp_hooks.embedding import TableConfig
from ddp_hooks.integrations.binding import ddp_of, replaced
from ddp_hooks.integrations.bindings import Bindings
from ddp_hooks.integrations.extended import ExtendedMethod
from ddp_hooks.integrations.fsdp import FsdpAttachment, find_problem
from ddp_hooks.integrations.settings import BUCKET_MB, Combination, Config, Dense, Tables, combination_of
from ddp_hooks.intercept import NonCopyableHook, clipping_of_frameworks
from fsdp_ext import ExtConfig

logger = logging.getLogger("ddp_hooks")

_INCOMPLETE = "ddp_hooks_incomplete"  # in a checkpoint's folder while it is written
_OTHER_ENGINES = {
    DistributedType.FSDP: "FSDP",
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}
_ALONE = (
    "one process: there is nothing to communicate, so training goes on without a hook. Several are started by torchrun "
    "or accelerate launch"
)
_EXTENDED = (
    "prepare_model",
    "prepare_optimizer",
    "clip_grad_norm_",
    "clip_grad_value_",
    "save_state",
    "load_state",
    "get_state_dict",
    "free_memory",
    "end_training",
)


@overload
def attach(accelerator: Accelerator, config: ExtConfig) -> FsdpAttachment: ...


@overload
def attach(accelerator: Accelerator, config: Dense | Tables | TableConfig) -> Attachment: ...


@overload
def attach(accelerator: Accelerator, config: Config) -> Attachment | FsdpAttachment: ...


def attach(accelerator: Accelerator, config: Config) -> Attachment | FsdpAttachment:
    """Train with a communication hook whatever this accelerator prepares from now on.

    ``prepare`` wraps models as DDP needs it, and binds each to the optimizer of its parameters;
    ``accelerator.clip_grad_norm_`` and ``clip_grad_value_``, ``save_state`` and ``load_state``, ``accumulate``,
    ``no_sync`` and the scaling of fp16's losses go on as they did. Changed are attributes of this accelerator alone; a
    pickled one has no hook.
    With one process there is nothing to do, which is logged.

    Args:
        accelerator: one that has prepared no model yet.
        config: a :class:`~ddp_hooks.DearConfig`, whose ``update="sharded"`` is taken as ``"auto"``, or a
            :class:`~ddp_hooks.TopKConfig`. Tables of a model, sharded by :func:`~ddp_hooks.shard_embeddings` before its
            optimizer is made, are found, and step with it; without a hook beside them:
            :class:`~ddp_hooks.integrations.Tables`. Where it shards models by FSDP2, a :class:`~fsdp_ext.ExtConfig`:
            every model is extended when it is prepared.

    Raises:
        TypeError: ``config`` is no configuration.
        ValueError: it cannot be combined, or not with this accelerator.
    """
    combination = combination_of(config)
    if combination.extension is not None:
        return _attach_extension(accelerator, combination.extension)
    engine = _OTHER_ENGINES.get(accelerator.distributed_type)
    if engine is not None:
        instead = ", or give an ExtConfig, which extends FSDP2" if engine == "FSDP" else ""
        raise ValueError(
            f"these are hooks of DistributedDataParallel, and this accelerator trains with {engine}: launch without "
            f"it{instead}{see('in-a-trainer')}"
        )
    handler = accelerator.ddp_handler
    if isinstance(handler, HookedDdpKwargs):
        raise ValueError(
            f"this accelerator has a communication hook already: pass attach() one configuration, or a list of those "
            f"that go together{see('in-a-trainer')}"
        )
    if handler is not None and handler.comm_hook != DDPCommunicationHookType.NO:
        raise ValueError(
            f"DistributedDataParallelKwargs(comm_hook={handler.comm_hook}) is a hook of its own, and DDP has one: "
            f"leave it out{see('in-a-trainer')}"
        )
    # Accelerate marks what it returns: DDP around a model, or the model itself where it only evaluates.
    if any(not getattr(model, "_is_accelerate_prepared", False) for model in accelerator._models):
        raise ValueError(
            f"this accelerator has prepared a model already: call attach() before accelerator.prepare()"
            f"{see('in-a-trainer')}"
        )
    attachment = Attachment(accelerator, combination)
    if accelerator.num_processes > 1:
        attachment.install()
    else:
        logger.warning(_ALONE)
    return attachment


def _attach_extension(accelerator: Accelerator, config: ExtConfig) -> FsdpAttachment:
    problem = find_problem(accelerator)
    if problem is not None and accelerator.num_processes > 1:
        raise ValueError(problem)
    attachment = FsdpAttachment(accelerator, config)
    if accelerator.num_processes > 1:
        attachment.install()
    else:
        logger.warning(_ALONE)
    return attachment


@dataclass
class HookedDdpKwargs(DistributedDataParallelKwargs):
    """What the hooks need of DDP. The hook itself is registered when the optimizer is known."""

    def register_comm_hook(self, model: nn.Module) -> None:
        """Leave the model's slot free."""

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of the accelerator has no hook, so its DDP is a plain one, with the same settings."""
        return DistributedDataParallelKwargs, (), vars(self)


class Attachment:
    """What was attached to an accelerator; :func:`attach` makes it."""

    def __init__(self, accelerator: Accelerator, combination: Combination) -> None:
        self.accelerator = accelerator
        self.combination = combination
        self.bindings = Bindings(combination.dense)
        """Of the models that were prepared with their optimizers, in that order."""
        self.keeps_models = False
        """Whether models that were prepared train on after ``free_memory``, as a Trainer's do."""
        self._is_complete = False  # whether what the loop saves was gathered already
        self._undo = ExitStack()

    # -- what users call --------------------------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        """Whether there are several processes."""
        return self.accelerator.num_processes > 1

    def stats(self) -> dict[str, float]:
        """Numbers of this rank's last step, of all models together: for ``accelerator.log``."""
        return self.bindings.stats()

    def synchronize(self) -> None:
        """Wait until parameters hold their new values, for C++ code and other processes that read them."""
        self.bindings.synchronize()

    def close(self) -> None:
        """Finish communication, let every rank do the same, and give the accelerator its own methods back."""
        self.bindings.release()
        self._undo.close()

    # -- what is made -----------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Extend the accelerator."""
        accelerator = self.accelerator
        clipping_of_frameworks["Accelerate"] = "accelerator.clip_grad_norm_(...)"
        self._undo.enter_context(replaced(accelerator, "ddp_handler", self._handler()))
        if accelerator.scaler is not None:
            self._undo.enter_context(replaced(accelerator, "scaler", self._scaler()))
        self._undo.callback(accelerator.register_save_state_pre_hook(NonCopyableHook(self._begin_checkpoint)).remove)
        for name in _EXTENDED:
            extended = ExtendedMethod(accelerator, name, getattr(self, f"_{name.rstrip('_')}"))
            self._undo.enter_context(replaced(accelerator, name, extended))

    def _handler(self) -> HookedDdpKwargs:
        former = self.accelerator.ddp_handler
        handler = HookedDdpKwargs(**vars(former)) if former is not None else HookedDdpKwargs()
        handler.gradient_as_bucket_view = True
        if self.combination.dense is not None and handler.bucket_cap_mb == HookedDdpKwargs.bucket_cap_mb:
            handler.bucket_cap_mb = BUCKET_MB
        return handler

    def _scaler(self) -> GradScaler:
        handler = self.accelerator.scaler_handler
        return GradScaler(self.accelerator.device.type, **(handler.to_kwargs() if handler is not None else {}))

    def _prepare_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prepared = original(*args, **kwargs)
        ddp = ddp_of(prepared)
        if ddp is not None:
            self.bindings.expect(ddp)
            self._bind()
        return prepared

    def _prepare_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prepared = original(*args, **kwargs)
        self._bind()
        return prepared

    def _bind(self) -> None:
        wrapper_of = {_unwrapped(prepared): prepared for prepared in self.accelerator._optimizers}
        for binding in self.bindings.bind(wrapper_of, self.accelerator.scaler):
            prepared, optimizer = wrapper_of[binding.optimizer], binding.optimizer
            if prepared.scaler is not None:  # it has kept step() as it was before, and would put that back
                prepared._optimizer_original_step_method = optimizer.step
                prepared._optimizer_patched_step_method = patch_optimizer_step(prepared, optimizer.step)

    def _free_memory(self, original: Callable[..., Any], *objects: Any) -> Any:
        if not self.keeps_models:
            self.bindings.release()
        return original(*objects)

    def _end_training(self, original: Callable[..., Any]) -> Any:
        self.bindings.release()  # before the process group is gone
        return original()

    # -- gradients --------------------------------------------------------------------------------------------------

    def _clip_grad_norm(
        self, original: Callable[..., Any], parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._refuse_between_parts("clip_grad_norm_")
        self.accelerator.unscale_gradients()
        norm = self.bindings.clip_grad_norm(given, max_norm, norm_type)
        return original(given, max_norm, norm_type) if norm is None else norm

    def _clip_grad_value(
        self, original: Callable[..., Any], parameters: Iterable[Tensor] | Tensor, clip_value: float
    ) -> None:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        self._refuse_between_parts("clip_grad_value_")
        self.accelerator.unscale_gradients()
        rest = self.bindings.clip_grad_value(given, clip_value)
        if rest:
            original(rest, clip_value)

    def _refuse_between_parts(self, name: str) -> None:
        if not self.accelerator.sync_gradients and any(binding.dear is not None for binding in self.bindings):
            raise RuntimeError(
                f"{name}() was called while gradients are being accumulated, of which every rank has its own: write "
                f"`if accelerator.sync_gradients:` before it{see('in-a-trainer')}"
            )

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @contextmanager
    def complete(self, everywhere: bool = False) -> Iterator[None]:
        """While it lasts, what the loop saves is complete where it saves it; collective.

        Args:
            everywhere: it saves on every node.
        """
        with ExitStack() as stack:
            stack.enter_context(self.bindings.complete(everywhere))
            stack.enter_context(replaced(self, "_is_complete", True))
            yield

    def _get_state_dict(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Accelerate asks every rank for the model's state, and writes the first one's."""
        with_tables = [binding for binding in self.bindings if binding.tables is not None]
        if not self._is_complete:
            for binding in with_tables:
                binding.consolidate_tables()
        return original(*args, **kwargs) if all(binding.has_whole_tables for binding in with_tables) else {}

    def _save_state(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        everywhere = self.accelerator.project_configuration.save_on_each_node
        with self.complete(everywhere):
            folder = original(*args, **kwargs)
            self.bindings.save(folder, everywhere)
        self.accelerator.wait_for_everyone()
        if self._writes:
            (Path(folder) / _INCOMPLETE).unlink()
        self.accelerator.wait_for_everyone()  # whoever returns finds a complete one
        return folder

    @property
    def _writes(self) -> bool:
        """Whether this process writes what is the same on all ranks."""
        accelerator = self.accelerator
        everywhere = accelerator.project_configuration.save_on_each_node
        return bool(accelerator.is_local_main_process if everywhere else accelerator.is_main_process)

    def _begin_checkpoint(self, models: Any, weights: Any, folder: str) -> None:
        """Mark a folder, which Accelerate has just made, until everything is in it."""
        if self._writes:
            (Path(folder) / _INCOMPLETE).touch()

    def _load_state(
        self, original: Callable[..., Any], input_dir: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        if input_dir is None and not self.accelerator.project_configuration.automatic_checkpoint_naming:
            original(None, *args, **kwargs)  # which says what is missing
        folder = Path(input_dir).expanduser() if input_dir is not None else self._latest_complete()
        if (folder / _INCOMPLETE).exists():
            raise ValueError(
                f"{folder} was not written to its end, perhaps because a process was killed: load an earlier one"
                f"{see('in-a-trainer')}"
            )
        for binding in self.bindings:
            binding.consolidate_tables(everywhere=True)  # Accelerate compares what it loads with state_dict()
        original(str(folder), *args, **kwargs)
        self.bindings.load(folder)

    def _latest_complete(self) -> Path:
        """Of the checkpoints under Accelerate's own names, the last one that was written to its end."""
        folders = (Path(self.accelerator.project_dir) / "checkpoints").glob("checkpoint_*")
        newest_first = sorted(folders, key=lambda folder: int(folder.name.rpartition("_")[2]), reverse=True)
        for folder in newest_first:
            if not (folder / _INCOMPLETE).exists():
                return folder
            logger.warning("%s was not written to its end, so it is not loaded", folder)
        raise ValueError(f"there is no complete checkpoint in {self.accelerator.project_dir}{see('in-a-trainer')}")


def _unwrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer
