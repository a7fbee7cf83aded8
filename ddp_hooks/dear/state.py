"""DearState: the object that users hold. :mod:`ddp_hooks.dear.step` has the course of a step."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_hooks.comm import Span, agree, at_exit, calling, see, whole
from ddp_hooks.dear import checks, refusals
from ddp_hooks.dear.checkpoint.optimizer_checkpoint import OptimizerCheckpoint
from ddp_hooks.dear.config import DearConfig
from ddp_hooks.dear.phase import Phase
from ddp_hooks.dear.stats import DearStats, ScalarWriter, StatsLog
from ddp_hooks.dear.step import StepDriver
from ddp_hooks.dear.update.clipping import clip_grad_norm_, gradients_of
from ddp_hooks.intercept import (
    NonCopyableHook,
    around_step,
    co_optimizers,
    extend_zero_grad,
    refuse_assigned_parameters,
    refuse_join,
    when_step_fails,
)
from ddp_hooks.planning.atoms import Fusion, FusionRule

logger = logging.getLogger("ddp_hooks")


class DearState:
    """The state of :func:`~ddp_hooks.dear_hook`: DeAR (zhang2023dear, sections III and IV).

    All-reduce is split: gradients are reduce-scattered under backward, the optimizer steps on this rank's shard of
    every parameter, and parameters are all-gathered under the next forward. The paper gathers gradients instead and
    updates everything everywhere; the volume is the same, the optimizer's state and work are 1/P here. For optimizers
    that need whole tensors ``DearConfig(update="replicated")`` does as the paper.

    The training loop stays as it was. Between backward and step the model's ``.grad`` may not be read (it raises).
    After ``optimizer.step()`` parameters may be in flight; reads and writes from Python wait for them.
    ``docs/dear.md`` lists the few functions and views that do not wait.

    Args:
        ddp: wrapped with ``gradient_as_bucket_view=True``. Forward pre-hooks are installed on its modules.
        optimizer: holding every parameter that DDP reduces; for sharded updates element-wise. From its first step on,
            its groups then hold shards in the place of parameters while it steps, and its state is spread over ranks.
        config: the settings.
        saved_by_loop: True if a loop calls :meth:`consolidate` before it saves, as integrations do. Else the log says
            once, here, that ``optimizer.state_dict()`` needs it.

    Raises:
        ValueError: on every rank, before anything is changed, when this cannot be right, or when ranks differ.

    Creating a state is collective: all ranks of the DDP module's group do it.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        optimizer: torch.optim.Optimizer,
        config: DearConfig | None = None,
        *,
        saved_by_loop: bool = False,
    ) -> None:
        config = config if config is not None else DearConfig()
        problem = checks.find_problem(ddp, optimizer, config)
        group = getattr(ddp, "process_group", None) or dist.group.WORLD
        assert group is not None, "torch.distributed is not initialised"
        entries = checks.fingerprint(ddp, optimizer, config) if problem is None else {}
        agree(entries, problem, group, "the set-up of DearState", config)

        self.config = config
        self._driver = driver = StepDriver(ddp, optimizer, config, group)
        self.device = driver.parameters.device
        """Device of the model."""
        self.tuning = driver.tuning
        """Search for a fusion size that ``config.tuner`` asks for; None without."""
        self._optimizer = optimizer
        self._handles = self._install_hooks(ddp)
        refusals.register(optimizer, driver.root, self)
        driver.co_optimizers += co_optimizers.co_optimizers_in(ddp.module)
        for co_optimizer in driver.co_optimizers:
            co_optimizer.follow(optimizer)
        if not driver.update.gathers_gradients and driver.lanes.rank == 0 and not saved_by_loop:
            logger.warning(
                "each rank keeps a part of the optimizer's state: optimizer.state_dict() will need "
                "state.consolidate() on all ranks before it, or use state.full_optimizer_state_dict()%s",
                see("optimizer-state-is-sharded"),
            )

    # -- what users call --------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait until every parameter holds its new value, for C++ code and other processes, which do not wait.

        Python code waits by itself. Communicates nothing: one rank alone may call it. With ``gather_dtype`` it is
        collective, and parameters hold all their bits afterwards, until the next step: one rank alone may then read.
        """
        self._driver.pipe.finish(on_host=True)
        self._driver.wires.refuse_lost_bits()

    def stats(self) -> DearStats:
        """Return the costs of the last complete step on this rank."""
        return self._driver.stats()

    def log_to(self, writer: ScalarWriter, every: int = 10, prefix: str = "ddp_hooks") -> None:
        """Write the statistics of every ``every``-th step as scalars.

        Args:
            writer: a ``torch.utils.tensorboard.SummaryWriter``, or anything with its ``add_scalar``.
            every: steps between two entries, >= 1.
            prefix: of the scalars' names.
        """
        self._driver.log = StatsLog(writer, every, prefix)

    def timeline(self) -> list[Span]:
        """Return spans of lanes and of waits, in order of start; needs ``DearConfig(trace=True)``."""
        return self._driver.recorder.snapshot()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the norm of the model's gradients, like ``torch.nn.utils.clip_grad_norm_`` on plain DDP.

        Between backward and ``optimizer.step()``; collective, one all-reduce of a scalar. For a norm over several
        models see :func:`ddp_hooks.clip_grad_norm_`, which also says what the arguments are. Sharded tables count.

        Returns:
            The norm before clipping, a scalar: equal on every rank.
        """
        return clip_grad_norm_([self], max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every gradient to ``[-clip_value, clip_value]``, like ``torch.nn.utils.clip_grad_value_``.

        Between backward and ``optimizer.step()``; all ranks do it.
        """
        clip_value = float(clip_value)  # as torch does, before ranks begin to do something together
        sources: list[co_optimizers.GradientShards] = [self, *self.co_optimizers]
        for source in sources:
            with source.reduced_gradients() as shards, torch.no_grad():
                for gradient in gradients_of(shards):
                    gradient.clamp_(-clip_value, clip_value)

    @contextmanager
    def reduced_gradients(self) -> Iterator[list[torch.nn.Parameter]]:
        """Return this rank's shards with their reduced gradients, to read or to change; all ranks enter it together.

        Between backward and ``optimizer.step()``. A shard is a flat range of one parameter, in storage order; its
        ``.grad`` is the mean over ranks, None where nobody used the parameter. Values computed from it differ between
        ranks: reduce them before acting on them.

        Raises:
            RuntimeError: the state was closed, gradients were not reduced, or it is called inside of the step of
                replicated updates.
            LaneError: a rank failed.
            LaneTimeout: communication did not complete within ``timeout_s``.
        """
        self._driver.begin_reading()
        try:
            yield [shard.tensor for shard in self._driver.update.shards]
        finally:
            self._driver.model_gradients.hide()

    @property
    def co_optimizers(self) -> list[co_optimizers.CoOptimizer]:
        """Sharded tables of the model, which step with the optimizer."""
        return self._driver.co_optimizers

    @property
    def other_parameters(self) -> list[Tensor]:
        """Parameters of the optimizer that DDP does not reduce."""
        ours = {id(shard.tensor) for shard in self._driver.update.shards}
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return [p for p in held if id(p) not in ours and self._driver.parameters.index_of(p) is None]

    @property
    def has_sharded_optimizer(self) -> bool:
        """True if the optimizer's state is spread over the ranks, as it is from the first sharded step on."""
        return not self._driver.update.is_whole

    @calling("full_optimizer_state_dict()")
    def full_optimizer_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's complete ``state_dict`` on every rank, as plain DDP's optimizer has it; collective.

        Tensors are on the CPU. Load it with ``optimizer.load_state_dict()``, here with any number of ranks, or on
        plain DDP. To have it on one rank only, see :meth:`consolidate`.
        """
        self._driver.pipe.make_whole()
        return self._checkpoint().full_state_dict()

    @calling("consolidate()")
    def consolidate(self, to: int = 0) -> None:
        """Gather the optimizer's state on rank ``to`` (of DDP's group), for code that saves there alone; collective.

        Until the next step ``optimizer.state_dict()`` returns the complete state there; on other ranks, and after
        the next step, it raises.
        """
        world_size = self._driver.lanes.world_size
        if not (whole(to, 0) and to < world_size):
            raise ValueError(f"consolidate(to=...) takes a rank from 0 to {world_size - 1}, got {to!r}")
        self._driver.pipe.make_whole()  # the same code saves the model there
        self._checkpoint().consolidate(to)

    def sharded_optimizer_state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the optimizer's state, flat and made of plain tensors.

        For ``torch.distributed.checkpoint.save`` and ``async_save``, where every rank writes its own part; see
        :meth:`load_sharded_optimizer`. Tensors are the optimizer's own, not copies, except masters of parameters that
        were written since the last step.
        """
        return self._checkpoint().sharded_state_dict()

    @calling("load_sharded_optimizer()")
    def load_sharded_optimizer(self, path: str | os.PathLike[str], prefix: str = "optimizer") -> None:
        """Restore the optimizer from a ``torch.distributed.checkpoint``; collective, with any number of ranks.

        Every rank reads only what overlaps its own part; before the first step state stays spread evenly until
        there are shards.

        Args:
            path: the checkpoint's folder.
            prefix: the key under which :meth:`sharded_optimizer_state_dict` was saved.

        Raises:
            ValueError: there is no such state, or it is of another model or optimizer.
        """
        self._checkpoint().load_sharded(path, prefix)

    def _checkpoint(self) -> OptimizerCheckpoint:
        self._driver.refuse_closed()
        self._driver.pipe.finish()
        self._driver.wires.refuse_lost_bits()
        return self._driver.checkpoint

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Return the sum of a small tensor over the ranks, on :attr:`device`; collective."""
        return self._driver.sum_over_ranks(value)

    def largest_over_ranks(self, value: Tensor) -> Tensor:
        """Return the largest values of a small tensor over the ranks, on :attr:`device`; collective."""
        return self._driver.sum_over_ranks(value, "largest_over_ranks()", largest=True)

    def scale_residuals(self, factor: float) -> None:
        """Multiply what rounded gradients left out by ``factor``; called by GradScaler when it changes its scale."""
        self._driver.wires.scale_residuals(factor)

    @calling("set_fusion()")
    def set_fusion(self, fusion: Fusion, *, mb: float | None = None, layers: int | None = None) -> None:
        """Change which atoms travel together, from the next backward on; moves no data.

        Collective: all ranks call it at the same step, between ``optimizer.step()`` and the next backward.

        Args:
            fusion: see :class:`DearConfig`.
            mb: largest group in MiB; None keeps the present value.
            layers: layers per group; None keeps the present value.

        Raises:
            ValueError: on every rank, if the settings are wrong or differ between ranks.
            RuntimeError: a backward has not been followed by a step yet.
        """
        if self._driver.reduction is not None:
            raise RuntimeError(
                "set_fusion between backward and optimizer.step(): call it after the step instead"
                f"{see('called-at-the-wrong-moment')}"
            )
        if self.tuning is not None and not self.tuning.finished:
            raise RuntimeError(
                "set_fusion while a tuner searches: leave the tuner out, or wait for state.tuning.finished"
                f"{see('called-at-the-wrong-moment')}"
            )
        present = self._driver.layout.rule
        rule = FusionRule(
            fusion, present.mb if mb is None else mb, present.layers if layers is None else layers
        )
        problem = None
        try:
            DearConfig(fusion=fusion, fusion_mb=mb, fusion_layers=layers)
        except ValueError as error:
            problem = str(error)
        agree({"fusion": rule}, problem, self._driver.lanes.group, "the fusion rule", self.config)
        self._driver.regroup(rule)

    def close(self) -> None:
        """Finish communication, let every rank do the same, remove all hooks and end the lanes.

        The parameters are complete afterwards. DDP cannot remove a communication hook and an optimizer keeps its
        shard of the state, so both are spent: to train on, wrap ``ddp.module`` again and make a new optimizer. (With
        replicated updates the optimizer stays as it is.)
        """
        # An error that leads here on one rank alone is not to wait for others.
        self._close(makes_whole=sys.exc_info()[0] is None)

    def _close_at_exit(self) -> None:
        self._close(makes_whole=False)

    def _close(self, makes_whole: bool) -> None:
        if self._driver.phase is Phase.CLOSED:
            return
        try:
            self._driver.close(makes_whole)
        finally:
            for handle in self._handles:
                handle.remove()
            if not self._driver.update.is_whole:
                self._optimizer.register_step_pre_hook(refusals.refuse_step)
                self._optimizer.register_state_dict_pre_hook(refusals.refuse_state_dict)
                self._optimizer.register_load_state_dict_pre_hook(refusals.refuse_state_dict)
            self._driver.lanes.close()
            refusals.unregister(self._optimizer, self._driver.root)
        if not self._driver.lanes.stuck:
            self._driver.wires.refuse_lost_bits()  # of the last step

    # -- hooks --------------------------------------------------------------------------------------------------------

    def reduce_bucket(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Launch the reduce-scatters of a bucket; called by :func:`~ddp_hooks.dear_hook`."""
        return self._driver.reduce_bucket(bucket)

    def _install_hooks(self, ddp: DistributedDataParallel) -> list[Any]:
        driver, optimizer = self._driver, self._optimizer
        checkpoint = driver.checkpoint

        def finish(*_: Any) -> None:  # keeps the state alive with the optimizer, for the handler at exit
            self._driver.pipe.finish()

        handles: list[Any] = [
            *around_step(
                optimizer,
                NonCopyableHook(driver.before_step),
                NonCopyableHook(driver.after_step),
                shows=driver.update.shows_gradients,
            ),
            optimizer.register_state_dict_pre_hook(finish),
            optimizer.register_state_dict_pre_hook(checkpoint.before_state_dict),
            optimizer.register_state_dict_post_hook(checkpoint.after_state_dict),
            optimizer.register_load_state_dict_pre_hook(finish),
            optimizer.register_load_state_dict_pre_hook(checkpoint.before_load),
            optimizer.register_load_state_dict_post_hook(checkpoint.after_load),
            ddp.register_forward_pre_hook(NonCopyableHook(driver.before_forward)),
            # First, so that other hooks of the model see which gradients are kept.
            ddp.module.register_forward_pre_hook(NonCopyableHook(driver.before_model), prepend=True),
            ddp.register_forward_hook(NonCopyableHook(driver.after_forward), always_call=True),
        ]
        handles += refuse_assigned_parameters(ddp, driver.parameters.tensors)
        why = "makes no forward, in which parameters are gathered"
        ddp.join = ddp.join_hook = partial(refuse_join, "DearState", why)  # type: ignore[method-assign]
        handles.append(extend_zero_grad(optimizer, driver.zero_grad))
        handles.append(when_step_fails(optimizer, driver.step_failed))
        handles.append(at_exit(self._close_at_exit, driver.lanes.abandon, self._is_stuck))
        return handles

    def _is_stuck(self) -> bool:
        return self._driver.lanes.stuck

    def __deepcopy__(self, memo: Any) -> DearState:
        raise TypeError(
            "a DDP module with DearState cannot be copied: the copy would lose its hook and share the optimizer. "
            "Copy ddp.module instead"
        )

    def __reduce__(self) -> Any:
        raise TypeError("a DDP module with DearState cannot be pickled: save ddp.module.state_dict() instead")
