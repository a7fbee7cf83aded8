"""``extend(model)`` after ``fully_shard``, and back; ``shard_by_size`` before."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ddp_hooks.comm import Span, Traffic, at_exit, gather_objects, mebibytes
from fsdp_ext import checks, compat
from fsdp_ext.all_gather import LaneAllGather, NativeAllGather
from fsdp_ext.config import ExtConfig
from fsdp_ext.context import ExtContext, ExtStats
from fsdp_ext.prefetch import Prefetcher
from fsdp_ext.reduce_scatter import LaneReduceScatter, NativeReduceScatter
from fsdp_ext.residuals import Residuals

logger = logging.getLogger("fsdp_ext")

_ATTRIBUTE = "_fsdp_ext_extension"
_FOR_CPUS = ("pending_mb", "prefetch", "lanes", "slice_mb")


def extend(model: nn.Module, config: ExtConfig | None = None) -> Extension:
    """Let FSDP2 communicate through lanes: after ``fully_shard``, before or after the optimizer is made. Collective.

    On CPUs, gathers and reduce-scatters run over point-to-point messages, beside the computation. Results stay the
    same, up to the order in which gradients are added, which is the order of ranks. On accelerators FSDP2's own exact
    collectives are as good, and stay.

    Reduce-scatters, and all-reduces over replicas (HSDP) that follow, end with the backward where nothing reads their
    results earlier, else where FSDP2 asks for them; ``docs/fsdp.md`` lists what reads them. A gradient that another
    hook reads before its reduce-scatter has ended is NaN.

    Args:
        model: a module with FSDP2's inside of it, which get our communication objects and lists of modules to prefetch;
            parameters, gradients and checkpoints are as before.
        config: the settings.

    Returns:
        The :class:`Extension`. Calling again with equal settings returns the existing one; different settings replace
        it and keep the residuals for which they have a use. :func:`restore` undoes it.

    Raises:
        ValueError: on every rank, before anything is changed, when this cannot work, or when ranks differ. A model that
            was extended before stays so.
    """
    config = config if config is not None else ExtConfig()
    present = extension_of(model)
    same = present is not None and present.config == config
    extended = "no" if present is None else "with these settings" if same else "with others"
    checks.agree_to_extend(model, config, extended)
    if present is None:
        return Extension(model, config)
    if same:
        return present
    residuals = present.state_dict()
    present.close()
    extension = Extension(model, config)
    extension.carry_over(residuals)
    return extension


def restore(model: nn.Module) -> None:
    """Undo :func:`extend`, between steps; do nothing if the model is not extended. Collective.

    Raises:
        LaneError: lanes have failed; the model is restored all the same.
    """
    extension = extension_of(model)
    if extension is not None:
        extension.close()


class Extension:
    """Communication of one model; :func:`extend` makes it."""

    def __init__(self, model: nn.Module, config: ExtConfig) -> None:
        self._model = model
        self.config = config
        self.context = ExtContext(config)
        self._residuals: list[Residuals] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._restore = contextlib.ExitStack()  # gives modules their own communication back
        self._handle = at_exit(self.close, self.abandon, self._is_stuck)
        modules = list(checks.fsdp_modules(model))
        on_cpu = [checks.is_on_cpu(module) for _, module in modules]
        self.prefetcher = Prefetcher(model, config.prefetch if all(on_cpu) else 0)
        for name, module in modules:
            self._take_over(name, module)
        setattr(model, _ATTRIBUTE, self)
        if any(on_cpu):
            return
        if config.all_gather == config.reduce_scatter == "exact":
            logger.info("parameters are on an accelerator: FSDP2's own exact collectives stay")
        unused = [name for name in _FOR_CPUS if getattr(config, name) is not None]
        if unused:
            logger.warning("parameters are on an accelerator, where %s have no effect: leave them out", unused)

    def stats(self) -> ExtStats:
        """Return the totals so far, on this rank."""
        context = self.context
        traffic = sum((lanes.traffic for lanes in context.lanes()), Traffic())
        return replace(
            context.counts,
            sent_bytes=traffic.sent_bytes,
            received_bytes=traffic.received_bytes,
            comm_s=traffic.busy_s,
            gather_stall_s=context.gather_stall.seconds,
            reduce_scatter_stall_s=context.scatter_stall.seconds,
        )

    def timeline(self) -> list[Span]:
        """Return the last spans of lanes and waits, sorted by start; needs ``ExtConfig(trace=True)``."""
        return self.context.recorder.snapshot()

    def state_dict(self) -> dict[str, DTensor]:
        """Return the residuals, by name of parameter: for checkpoints. Collective, between steps.

        Sharded as the parameters are, so that ``torch.distributed.checkpoint`` saves them, and loads them for any
        number of ranks. Empty unless ``reduce_scatter`` is ``"sparse"``, or an integer format with error feedback.
        Residuals of other ranks' shards move to these ranks, so that a run that goes on has the same bits as one that
        resumes.

        Raises:
            LaneError: a rank did not come.
        """
        self.context.pending.drop()  # there is something only after a backward that failed
        state: dict[str, DTensor] = {}
        for group in dict.fromkeys(group for residuals in self._residuals for group in residuals.groups):
            gather_objects(None, group, "Extension.state_dict()", self.config)  # or some would wait without a name
        for residuals in self._residuals:
            residuals.move_to_owners()
            state |= residuals.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, DTensor]) -> None:
        """Replace all residuals by those of :meth:`state_dict`, between steps.

        Raises:
            ValueError: it is of other parameters, settings or ranks; nothing is changed then.
        """
        kept = {name: value for residuals in self._residuals for name, value in residuals.state_dict().items()}
        problem = checks.find_problem_of_state(state, kept)
        if problem is not None:
            raise ValueError(problem)
        self.carry_over(state)

    def carry_over(self, state: Mapping[str, DTensor]) -> None:
        """Load residuals of a model that was extended with other settings; drop the useless ones, with a warning."""
        dropped = set(state)
        for residuals in self._residuals:
            dropped -= residuals.load_state_dict(state)
        if dropped:
            logger.warning(
                "residuals of %s are dropped: these settings keep none of them",
                min(dropped) if len(dropped) == 1 else f"{min(dropped)} and {len(dropped) - 1} more parameters",
            )

    def scale_leftovers(self, factor: float) -> None:
        """Multiply the residuals; 0 forgets them. On all ranks, between steps.

        For a loss scale that changes: a residual has the scale of its own step. And for a batch whose gradients are not
        to be used: what was left out of them is not to be used, either.
        """
        for residuals in self._residuals:
            residuals.scale(factor)

    def close(self) -> None:
        """Finish all communication, give modules their own communication back, and end the lanes; collective.

        Raises:
            LaneError: lanes have failed; everything is given back all the same.
        """
        self.context.is_closing = True
        self._handle.remove()
        vars(self._model).pop(_ATTRIBUTE, None)
        with contextlib.ExitStack() as rest:  # all of it, also if lanes have failed
            for lanes in self.context.lanes():
                rest.callback(lanes.close)
            rest.callback(self._restore.close)
            rest.callback(self.prefetcher.remove)
            self.context.pending.drop()  # there is something only after a backward that failed

    def abandon(self, error: BaseException) -> None:
        """Tell other ranks that this rank ends because of ``error``."""
        for lanes in self.context.lanes():
            lanes.abandon(error)

    def _take_over(self, name: str, module: FSDPModule) -> None:
        before, config = compat.communication_of(module), self.config
        on_cpu = checks.is_on_cpu(module)
        if before is None or (not on_cpu and config.all_gather == config.reduce_scatter == "exact"):
            return  # it has no parameters of its own, or FSDP2's collectives are as good
        residuals = Residuals(module, self._names) if config.keeps_residuals_of(name) else None
        if residuals is not None:
            self._residuals.append(residuals)
        self._restore.callback(module.set_custom_all_gather, before[0])
        self._restore.callback(module.set_custom_reduce_scatter, before[1])
        if on_cpu:
            scatter = LaneReduceScatter(self.context, module, name, residuals)
            self._restore.callback(scatter.remove)
            module.set_custom_reduce_scatter(scatter)
            module.set_custom_all_gather(LaneAllGather(self.context, self.prefetcher, module, name))
        else:
            module.set_custom_reduce_scatter(NativeReduceScatter(config, residuals))
            module.set_custom_all_gather(NativeAllGather(config, module))

    def _is_stuck(self) -> bool:
        return any(lanes.stuck for lanes in self.context.lanes())


def extension_of(model: object) -> Extension | None:
    """Return the extension that the model keeps, so that both are freed together."""
    found = getattr(model, _ATTRIBUTE, None) if isinstance(model, nn.Module) else None
    return found if isinstance(found, Extension) else None


def shard_by_size(
    model: nn.Module, blocks: Sequence[nn.Module], block_mb: float, first_mb: float = 1.0, **options: Any
) -> nn.Module:
    """Call ``fully_shard`` for runs of blocks of at least ``block_mb`` together, then for the rest at the root.

    Blocks of one group are gathered and reduced together: larger groups make fewer, longer messages and take less of
    the processor, smaller ones begin earlier and need less memory. The first group is small, as nothing hides it.

    Args:
        model: changed in place, and returned.
        blocks: modules inside of it, such as the layers of a transformer, in the order in which they run.
        block_mb: least size of a group, in MiB of parameters; the last one may be smaller.
        first_mb: the first group has at least ``min(first_mb, block_mb)``.
        options: of ``fully_shard``.
    """
    runs: list[list[nn.Module]] = [[]]
    enough = min(mebibytes(first_mb), mebibytes(block_mb))
    for block in blocks:
        runs[-1].append(block)
        if sum(parameter.nbytes for member in runs[-1] for parameter in member.parameters()) >= enough:
            runs.append([])
            enough = mebibytes(block_mb)
    for run in filter(None, runs):
        fully_shard(run if len(run) > 1 else run[0], **options)
    fully_shard(model, **options)
    return model
