"""Lightning: a strategy for its Trainer and one for Fabric, which register hooks on any device.

    trainer = Trainer(strategy=CommHookStrategy(DearConfig()), devices=4)

    fabric = Fabric(strategy=CommHookFabricStrategy(DearConfig()), devices=4)

Lightning's own ``DDPStrategy(ddp_comm_hook=...)`` registers hooks on CUDA alone, before there is an optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING or find_spec("lightning") is not None:
    from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch.strategies import DDPStrategy
elif find_spec("lightning_fabric") is None or find_spec("pytorch_lightning") is None:
    raise ImportError("this needs Lightning: pip install lightning")
else:  # the same under their former names
    from lightning_fabric.strategies import DDPStrategy as FabricDDPStrategy
    from pytorch_lightning.strategies import DDPStrategy

from ddp_hooks.dear import GradScaler
from ddp_hooks.integrations.bindings import Bindings
from ddp_hooks.integrations.settings import BUCKET_MB, Config, combination_of
from ddp_hooks.intercept import clipping_of_frameworks

logger = logging.getLogger("ddp_hooks")


class _Hooked:
    """What both strategies do with models, optimizers and checkpoints."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        if "ddp_comm_hook" in kwargs:
            raise ValueError("ddp_comm_hook is a hook of its own, and DDP has one: leave it out")
        self.bindings = Bindings(combination_of(config).dense)
        """Of the models that are trained."""
        defaults = {"gradient_as_bucket_view": True, "bucket_cap_mb": BUCKET_MB}
        super().__init__(**{**defaults, **kwargs})

    @property
    def _has_peers(self) -> bool:
        return bool(self.world_size > 1)  # type: ignore[attr-defined]

    def stats(self) -> dict[str, float]:
        """Numbers of this rank's last step: for ``self.log_dict`` or ``fabric.log_dict``."""
        return self.bindings.stats()

    def synchronize(self) -> None:
        """Wait until parameters hold their new values, for C++ code and other processes that read them."""
        self.bindings.synchronize()

    def _expect(self, ddp: DistributedDataParallel) -> None:
        if self._has_peers:
            self.bindings.expect(ddp)
        else:
            logger.warning("one process: there is nothing to communicate, so training goes on without a hook")

    def _use_our_scaler(self, precision: Any) -> torch.amp.GradScaler | None:
        """Put ours in the place of torch's, with the same settings."""
        stock = getattr(precision, "scaler", None)
        if type(stock) is torch.amp.GradScaler and self._has_peers:
            precision.scaler = GradScaler(
                self.root_device.type,  # type: ignore[attr-defined]
                init_scale=stock.get_scale(),
                growth_factor=stock.get_growth_factor(),
                backoff_factor=stock.get_backoff_factor(),
                growth_interval=stock.get_growth_interval(),
            )
        return getattr(precision, "scaler", None)

    def _optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Complete where checkpoints are written; collective."""
        inner = _unwrapped(optimizer)
        bound = self.bindings.of(inner)
        return bound[0].optimizer_state() if bound else inner.state_dict()

    def _module_state(self, ask: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The model's state; with sharded tables on the first rank alone, and collective."""
        for binding in self.bindings:
            binding.consolidate_tables()
        return ask() if all(binding.has_whole_tables for binding in self.bindings) else {}

    def _save_beside(self, path: str | Path) -> None:
        """Write what is not in model and optimizer into a folder beside the checkpoint; all ranks do it."""
        if any(binding.tables is not None or binding.topk is not None for binding in self.bindings):
            for binding in self.bindings:
                binding.consolidate_tables()
            self.bindings.save(_beside(path))
            self.barrier()  # type: ignore[attr-defined]  # where there is a checkpoint, all ranks' parts are there


class CommHookStrategy(_Hooked, DDPStrategy):
    """``DDPStrategy`` of Lightning's Trainer whose gradients travel by a communication hook.

    Clipping (``gradient_clip_val``), accumulation, precision, checkpoints, which plain DDP can resume and the other way
    round, validation and several ``fit`` go on as they did. Tables of the model, sharded by
    :func:`~ddp_hooks.shard_embeddings` in ``configure_model``, are found, and step with its optimizer.

    Args:
        config: a :class:`~ddp_hooks.DearConfig`, whose ``update="sharded"`` is taken as ``"auto"``, a
            :class:`~ddp_hooks.TopKConfig`, or for tables alone :class:`~ddp_hooks.integrations.Tables`.
        **kwargs: of ``DDPStrategy``, and of ``DistributedDataParallel``, whose ``gradient_as_bucket_view`` is True and
            whose ``bucket_cap_mb`` is 5 unless given.

    Raises:
        TypeError, ValueError: the configuration is none, or cannot be combined.
    """

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__(config, **kwargs)
        self._path: str | Path | None = None
        self._has_failed = False

    def configure_ddp(self) -> None:
        """Lightning's."""
        self.bindings.release()  # of a former fit
        super().configure_ddp()
        clipping_of_frameworks["Lightning"] = "gradient_clip_val"
        assert isinstance(self.model, DistributedDataParallel)
        self._expect(self.model)

    def setup_optimizers(self, trainer: Any) -> None:
        """Lightning's, and the hook, which knows them."""
        super().setup_optimizers(trainer)
        self._has_failed = False
        scaler = self._use_our_scaler(self.precision_plugin)
        if self._has_peers:
            self.bindings.bind([_unwrapped(optimizer) for optimizer in self.optimizers], scaler)
            self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
            self.precision_plugin.clip_grad_by_value = self._clip_by_value  # type: ignore[method-assign]

    def _clip_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        parameters = self._parameters_of(optimizer)
        if self.bindings.clip_grad_norm(parameters, clip_val) is None:
            nn.utils.clip_grad_norm_(parameters, clip_val)

    def _clip_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        rest = self.bindings.clip_grad_value(self._parameters_of(optimizer), clip_val)
        if rest:
            nn.utils.clip_grad_value_(rest, clip_val)

    def _parameters_of(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """What an optimizer updates; those of the model where it holds shards of them."""
        bound = self.bindings.of(_unwrapped(optimizer))
        if not any(binding.has_sharded_optimizer for binding in bound):
            return [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [parameter for binding in bound for parameter in binding.ddp.parameters() if parameter.requires_grad]

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The complete state on the first rank, nothing on others; collective. After a fit, what it was at its end."""
        return self._optimizer_state(optimizer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Lightning's; with sharded tables on the first rank alone, and collective."""
        return self._module_state(super().lightning_module_state_dict)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Lightning's. What a plain strategy has not goes into ``<filepath>.ddp_hooks``, a folder."""
        self._save_beside(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Lightning's."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            _remove(_beside(filepath))

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> Any:
        """Lightning's."""
        self._path = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Lightning's; every rank cuts out its part."""
        super().load_optimizer_state_dict(checkpoint)
        if self._path is not None:
            self.bindings.load(_beside(self._path))

    # -- the end ----------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """Lightning's."""
        self._has_failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Lightning's, after communication has finished; states stay complete for ``trainer.save_checkpoint()``."""
        if self._has_failed:
            self.bindings.release()
        else:
            self.bindings.finish()
        super().teardown()


class CommHookFabricStrategy(_Hooked, FabricDDPStrategy):
    """Fabric's ``DDPStrategy`` whose gradients travel by a communication hook.

    ``fabric.setup(model, optimizer)``, ``fabric.clip_gradients``, ``no_backward_sync``, ``fabric.save`` and
    ``fabric.load`` go on as they did. Arguments and errors as of :class:`CommHookStrategy`.
    """

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        """Fabric's."""
        ddp = super().setup_module(module)
        clipping_of_frameworks["Fabric"] = "fabric.clip_gradients(...)"
        self._expect(ddp)
        return ddp

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Fabric's, and the hook, which knows it."""
        optimizer = super().setup_optimizer(optimizer)
        self.bindings.bind([_unwrapped(optimizer)], self._use_our_scaler(self.precision))
        kind = type(optimizer)
        optimizer.__class__ = type(kind.__name__, (_ReachedByZeroGrad, kind), {"__module__": kind.__module__})
        return optimizer

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Fabric's."""
        if not self.bindings.of(_unwrapped(optimizer)):
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)
        self.precision.unscale_gradients(optimizer)
        norm: Tensor = self.bindings.clip_grad_norm(
            module.parameters(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        """Fabric's."""
        if not self.bindings.of(_unwrapped(optimizer)):
            return super().clip_gradients_value(module, optimizer, clip_val)
        self.precision.unscale_gradients(optimizer)
        self.bindings.clip_grad_value(module.parameters(), clip_val)
        return None

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The complete state on the first rank, nothing on others; collective."""
        return self._optimizer_state(optimizer)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Fabric's; with sharded tables on the first rank alone, and collective."""
        ask = super().get_module_state_dict
        return self._module_state(lambda: ask(module))

    def save_checkpoint(self, path: str | Path, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Fabric's. What a plain strategy has not goes into ``<path>.ddp_hooks``, a folder."""
        self._save_beside(path)
        super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Fabric's."""
        rest = super().load_checkpoint(path, *args, **kwargs)
        self.bindings.load(_beside(path))
        return rest


class _ReachedByZeroGrad:
    """Fabric's wrapper runs the class's ``zero_grad`` on itself, and so passes by what was added to the instance."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        inner: Any = vars(self).get("_optimizer", super())
        inner.zero_grad(set_to_none)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    """Without Lightning's or Fabric's own around it."""
    inner: torch.optim.Optimizer = getattr(optimizer, "_optimizer", getattr(optimizer, "optimizer", optimizer))
    return inner


def _beside(path: str | Path) -> Path:
    return Path(f"{path}.ddp_hooks")


def _remove(folder: Path) -> None:
    for path in folder.glob("*.bin"):
        path.unlink()
    if folder.is_dir():
        folder.rmdir()
