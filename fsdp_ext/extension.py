"""``extend(model)`` after ``fully_shard``, and back; ``shard_by_size`` before."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ddp_hooks.comm import Span, at_exit, gather_objects, mebibytes
from fsdp_ext import checks, compat
from fsdp_ext.all_gather import LaneAllGather
from fsdp_ext.config import ExtConfig
from fsdp_ext.context import ExtContext, ExtStats
from fsdp_ext.native import NativeAllGather, NativeReduceScatter
from fsdp_ext.prefetch import Prefetcher
from fsdp_ext.reduce_scatter import LaneReduceScatter
from fsdp_ext.residuals import Residuals

logger = logging.getLogger("fsdp_ext")

_ATTRIBUTE = "_fsdp_ext_extension"


def extend(model: nn.Module, config: ExtConfig | None = None) -> Extension:
    """Let FSDP2 communicate through lanes: after ``fully_shard``, before or after the optimizer is made.

    On CPUs, gathers and reduce-scatters run over point-to-point messages, beside the computation. Results stay the
    same, up to the order in which gradients are added, which is the order of ranks. On accelerators FSDP2's own exact
    collectives are as good, and stay.

    A reduce-scatter, the all-reduce over replicas (HSDP) that follows it, and divisions and conversions of its result
    end with the backward, where nothing reads the result earlier: without ``set_all_reduce_hook``,
    ``set_requires_all_reduce(False)``, offloading or ``register_post_accumulate_grad_hook``, and where gradients were
    None before or all parameters of the module get one. Elsewhere the backward waits for each; with offloading or
    ``defer=False`` only for the rest of it when the module's last gradient is ready (``ExtConfig.early``). A gradient
    that another hook reads before its reduce-scatter has ended is NaN. Over replicas gradients are averaged exactly, in
    the type that they are summed in.

    Args:
        model: a module with FSDP2's inside of it, which get our communication objects and lists of modules to prefetch;
            parameters, gradients and checkpoints are as before.
        config: the settings.

    Returns:
        The :class:`Extension`. Calling again with equal settings returns the existing one; different settings replace
        it and keep the residuals for which they have a use.

    Raises:
        ValueError: on every rank, before anything is changed, when this cannot work, or when ranks differ. A model that
            was extended before stays so.

    Collective: all ranks of the model's meshes do it. :func:`restore` undoes it.
    """
    config = config if config is not None else ExtConfig()
    present = _extension_of(model)
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
    extension = _extension_of(model)
    if extension is not None:
        extension.close()


def abandon(model: nn.Module, error: BaseException) -> None:
    """Tell ranks that wait for this one that ``error`` ends its step; do nothing if the model is not extended."""
    extension = _extension_of(model)
    if extension is not None:
        extension.abandon(error)


class Extension:
    """Communication of one model; :func:`extend` makes it."""

    def __init__(self, model: nn.Module, config: ExtConfig) -> None:
        self._model = model
        self.config = config
        self.context = ExtContext(config)
        self._residuals: list[Residuals] = []
        self._replaced: list[tuple[FSDPModule, tuple[Any, Any]]] = []
        self._scatters: list[LaneReduceScatter] = []
        self._names = {module: name for name, module in model.named_modules()}
        self._handle = at_exit(self.close, self.abandon, self._is_stuck)
        modules = list(checks.fsdp_modules(model))
        on_cpu = [checks.is_on_cpu(module) for _, module in modules]
        self.prefetcher = Prefetcher(model, config.prefetch if all(on_cpu) else 0)
        for name, module in modules:
            self._take_over(name, module)
        setattr(model, _ATTRIBUTE, self)
        if not self._replaced:
            logger.info("parameters are on an accelerator: FSDP2's own exact collectives stay")
        unused = checks.unused_settings(config)
        if unused and not any(on_cpu):
            logger.warning("parameters are on an accelerator, where %s have no effect: leave them out", unused)

    def stats(self) -> ExtStats:
        """Return the totals so far, on this rank."""
        return self.context.stats()

    def timeline(self) -> list[Span]:
        """Return the last spans of lanes and waits, sorted by start; needs ``ExtConfig(trace=True)``."""
        return self.context.recorder.snapshot()

    def state_dict(self) -> dict[str, DTensor]:
        """Return the residuals, by name of parameter: for checkpoints.

        Sharded as the parameters are, so that ``torch.distributed.checkpoint`` saves them, and loads them for any
        number of ranks. Empty unless ``reduce_scatter`` is ``"sparse"``, or ``"int8"`` with error feedback. Collective,
        between steps: residuals of each other's shards move to the ranks that own them, so that a run that goes on has
        the same bits as one that resumes.

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
        wanted = [(residuals, residuals.state_dict().keys()) for residuals in self._residuals]
        for residuals, names in wanted:
            residuals.load_state_dict({name: state[name] for name in names if name in state})
        dropped = state.keys() - {name for _, names in wanted for name in names}
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

    @property
    def link_bytes_s(self) -> float | None:
        """Measured rate of the slowest link; None if it was not measured."""
        found = [transport.link.goodput_bytes_s for transport in self.context.transports]
        return min((goodput for goodput in found if goodput is not None), default=None)

    def close(self) -> None:
        """Finish all communication, give modules their own communication back, and end the lanes; collective.

        Raises:
            LaneError: lanes have failed; everything is given back all the same.
        """
        self.context.is_closing = True
        self._handle.remove()
        vars(self._model).pop(_ATTRIBUTE, None)
        with contextlib.ExitStack() as rest:  # all of it, also if lanes have failed
            for transport in self.context.transports:
                rest.callback(transport.close)
            rest.callback(self._give_back)
            rest.callback(self.prefetcher.remove)
            self.context.pending.drop()  # there is something only after a backward that failed

    def abandon(self, error: BaseException) -> None:
        """Tell other ranks that this rank ends because of ``error``."""
        for transport in self.context.transports:
            transport.abandon(error)

    def _take_over(self, name: str, module: FSDPModule) -> None:
        before = compat.communication_of(module)
        if before is None:
            return  # it has no parameters of its own
        config = self.config
        replicas = compat.replicas_of(module)
        residuals = Residuals(module, self._names, replicas) if config.keeps_residuals_of(name) else None
        if checks.is_on_cpu(module):
            module.set_custom_all_gather(LaneAllGather(self.context, self.prefetcher, module, name))
            self._scatters.append(LaneReduceScatter(self.context, module, name, residuals))
            module.set_custom_reduce_scatter(self._scatters[-1])
        elif config.is_exact:
            return
        else:
            module.set_custom_all_gather(NativeAllGather(config, module))
            module.set_custom_reduce_scatter(NativeReduceScatter(config, residuals))
        self._replaced.append((module, before))
        if residuals is not None:
            self._residuals.append(residuals)

    def _give_back(self) -> None:
        while self._scatters:
            self._scatters.pop().remove()
        while self._replaced:
            module, (gather, scatter) = self._replaced.pop()
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)

    def _is_stuck(self) -> bool:
        return any(transport.is_stuck for transport in self.context.transports)


def _extension_of(model: object) -> Extension | None:
    """The model keeps it, so that both are freed together."""
    found = getattr(model, _ATTRIBUTE, None) if isinstance(model, nn.Module) else None
    return found if isinstance(found, Extension) else None


def shard_by_size(
    model: nn.Module, blocks: Sequence[nn.Module], block_mb: float, first_mb: float = 1.0, **options: Any
) -> nn.Module:
    """Call ``fully_shard`` for runs of blocks of at least ``block_mb`` together, then for the rest at the root.

    Blocks of one group are gathered and reduced together: larger groups make fewer, longer messages and take less of
    the processor, smaller ones begin earlier and need less memory. The first group is small, as nothing hides it: its
    gradients are the last to be ready, when nothing is left to compute, and its parameters are needed first.

    Args:
        model: changed in place, and returned.
        blocks: modules inside of it, such as the layers of a transformer, in the order in which they run.
        block_mb: least size of a group, in MiB of parameters; the last one may be smaller.
        first_mb: the first group has at least ``min(first_mb, block_mb)``.
        options: of ``fully_shard``.
    """
    run: list[nn.Module] = []
    enough = min(mebibytes(first_mb), mebibytes(block_mb))
    for block in blocks:
        run.append(block)
        if sum(parameter.nbytes for member in run for parameter in member.parameters()) >= enough:
            fully_shard(run if len(run) > 1 else run[0], **options)
            run, enough = [], mebibytes(block_mb)
    if run:
        fully_shard(run if len(run) > 1 else run[0], **options)
    fully_shard(model, **options)
    return model
