"""Lightning: a strategy for its Trainer and one for Fabric, which register hooks on every device.

    trainer = Trainer(strategy=CommHookStrategy(DearConfig()), devices=4)

    fabric = Fabric(strategy=CommHookFabricStrategy(DearConfig()), devices=4)

Lightning's own ``DDPStrategy(ddp_comm_hook=...)`` registers hooks on CUDA only, and before an optimizer exists.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from functools import partial
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

from ddp_hooks.integrations.hooked_models import HookedModels, scaler_like
from ddp_hooks.integrations.settings import BUCKET_MB, Config, combination_of
from ddp_hooks.intercept import clipping_of_frameworks

logger = logging.getLogger("ddp_hooks")


class _Hooked:
    """Common part of both strategies."""

    def __init__(self, config: Config, **kwargs: Any) -> None:
        if "ddp_comm_hook" in kwargs:
            raise ValueError("ddp_comm_hook is a hook of its own, and DDP has one: leave it out")
        self.hooked_models = HookedModels(combination_of(config).dense)
        super().__init__(**{"gradient_as_bucket_view": True, "bucket_cap_mb": BUCKET_MB, **kwargs})

    @property
    def _has_peers(self) -> bool:
        return bool(self.world_size > 1)  # type: ignore[attr-defined]

    def stats(self) -> dict[str, float]:
        """Return statistics of this rank's last step, for ``self.log_dict`` or ``fabric.log_dict``."""
        return self.hooked_models.stats()

    def synchronize(self) -> None:
        """Wait until parameters hold their new values, for C++ code and other processes that read them."""
        self.hooked_models.synchronize()

    def _expect(self, ddp: DistributedDataParallel) -> None:
        if self._has_peers:
            self.hooked_models.expect(ddp)
        else:
            logger.warning("one process: there is nothing to communicate, so training goes on without a hook")

    def _use_our_scaler(self, precision: Any) -> torch.amp.GradScaler | None:
        """Replace torch's scaler by :class:`~ddp_hooks.GradScaler` with the same settings; return the one in force."""
        scaler = getattr(precision, "scaler", None)
        if type(scaler) is torch.amp.GradScaler and self._has_peers:
            scaler = precision.scaler = scaler_like(scaler)
        return scaler

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the complete state, after a fit the last one; with DeAR {} on all ranks but the first. Collective."""
        inner = _unwrapped(optimizer)
        models = self.hooked_models.of(inner)
        return models[0].optimizer_state() if models else inner.state_dict()

    def _parameters_of(self, optimizer: torch.optim.Optimizer) -> list[Tensor]:
        """Return the parameters of an optimizer; if it holds shards, the model's parameters."""
        models = self.hooked_models.of(_unwrapped(optimizer))
        if not any(model.dear is not None and model.dear.has_sharded_optimizer for model in models):
            return [parameter for group in optimizer.param_groups for parameter in group["params"]]
        return [parameter for model in models for parameter in model.ddp.parameters() if parameter.requires_grad]

    def _save_beside(self, path: str | Path) -> None:
        if any(model.tables is not None or model.feedback is not None for model in self.hooked_models):
            self.hooked_models.consolidate_tables()
            self.hooked_models.save(_beside(path))
            self.barrier()  # type: ignore[attr-defined]  # a checkpoint appears after all ranks' files


class CommHookStrategy(_Hooked, DDPStrategy):
    """``DDPStrategy`` of Lightning's Trainer whose gradients travel by a communication hook.

    Clipping (``gradient_clip_val``), accumulation, precision, validation and several ``fit`` work as before. Plain DDP
    can resume its checkpoints, and the other way round. Tables of the model step with its optimizer; make them by
    :func:`~ddp_hooks.shard_embeddings` in ``configure_model``.

    Args:
        config: a :class:`~ddp_hooks.DearConfig`, whose ``update="sharded"`` means ``"auto"`` here, a
            :class:`~ddp_hooks.TopKConfig`, a :class:`~ddp_hooks.QuantizedConfig`, or for tables alone
            :class:`~ddp_hooks.integrations.Tables`.
        **kwargs: of ``DDPStrategy`` and ``DistributedDataParallel``. The defaults of ``gradient_as_bucket_view`` and
            ``bucket_cap_mb`` are True and 5.

    Raises:
        TypeError: ``config`` is no configuration.
        ValueError: parts of ``config`` exclude each other, or ``ddp_comm_hook`` is given.
    """

    _path: str | Path | None = None  # of the checkpoint that is loaded
    _has_failed = False

    def configure_ddp(self) -> None:
        self.hooked_models.release()  # of a former fit
        super().configure_ddp()
        clipping_of_frameworks["Lightning"] = "gradient_clip_val"
        assert isinstance(self.model, DistributedDataParallel)
        self._expect(self.model)

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self._has_failed = False
        scaler = self._use_our_scaler(self.precision_plugin)
        if self._has_peers:
            self.hooked_models.bind(map(_unwrapped, self.optimizers), scaler)
            self.precision_plugin.clip_grad_by_norm = self._clip_by_norm  # type: ignore[method-assign]
            self.precision_plugin.clip_grad_by_value = self._clip_by_value  # type: ignore[method-assign]

    def _clip_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        self.hooked_models.clip_grad_norm(self._parameters_of(optimizer), clip_val)

    def _clip_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        self.hooked_models.clip_grad_value(self._parameters_of(optimizer), clip_val)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self.hooked_models.model_state(super().lightning_module_state_dict)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        """Save a checkpoint; residuals and the state of tables go into the folder ``<filepath>.ddp_hooks``."""
        self._save_beside(filepath)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: str | Path, *args: Any, **kwargs: Any) -> Any:
        self._path = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        if self._path is not None:
            self.hooked_models.load(_beside(self._path))

    # -- the end ----------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """End communication; the state stays for ``trainer.save_checkpoint()``, unless the fit has failed."""
        if self._has_failed:
            self.hooked_models.release()
        else:
            self.hooked_models.close()
        super().teardown()


class CommHookFabricStrategy(_Hooked, FabricDDPStrategy):
    """Fabric's ``DDPStrategy`` whose gradients travel by a communication hook.

    ``fabric.setup(model, optimizer)``, ``fabric.clip_gradients``, ``no_backward_sync``, ``fabric.save`` and
    ``fabric.load`` work as before. Arguments and errors are those of :class:`CommHookStrategy`.
    """

    def setup_module(self, module: nn.Module) -> DistributedDataParallel:
        ddp = super().setup_module(module)
        clipping_of_frameworks["Fabric"] = "fabric.clip_gradients(...)"
        self._expect(ddp)
        return ddp

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer = super().setup_optimizer(optimizer)
        self.hooked_models.bind([_unwrapped(optimizer)], self._use_our_scaler(self.precision))
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
        self.precision.unscale_gradients(optimizer)
        return self.hooked_models.clip_grad_norm(
            self._parameters_of(optimizer), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def clip_gradients_value(self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        self.precision.unscale_gradients(optimizer)
        self.hooked_models.clip_grad_value(self._parameters_of(optimizer), clip_val)

    get_optimizer_state = _Hooked.optimizer_state

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return self.hooked_models.model_state(partial(super().get_module_state_dict, module))

    def save_checkpoint(self, path: str | Path, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self._save_beside(path)
        super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(self, path: str | Path, *args: Any, **kwargs: Any) -> dict[str, Any]:
        rest = super().load_checkpoint(path, *args, **kwargs)
        self.hooked_models.load(_beside(path))
        return rest


class _ReachedByZeroGrad:
    """Optimizer whose ``zero_grad`` is that of its instance: Fabric's wrapper calls that of the class on itself."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        inner: Any = vars(self).get("_optimizer", super())
        inner.zero_grad(set_to_none)


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    inner: torch.optim.Optimizer = getattr(optimizer, "_optimizer", getattr(optimizer, "optimizer", optimizer))
    return inner


def _beside(path: str | Path) -> Path:
    return Path(f"{path}.ddp_hooks")
