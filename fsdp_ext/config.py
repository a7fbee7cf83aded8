"""Settings of the extension."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias, get_args

from ddp_hooks.comm import above, check_booleans, check_slice, check_waits, check_whole, positive, refuse_unused, whole
from ddp_hooks.comm.wire.codecs import CodecName
from ddp_hooks.sparse.codec import Format

ScatterName: TypeAlias = Literal["exact", "bf16", "int8", "int4", "sparse"]
_DENSITY = 0.01
_INTEGERS = ("int8", "int4")
_GATHERS, _SCATTERS = get_args(CodecName), get_args(ScatterName)


@dataclass(frozen=True)
class ExtConfig:
    """How FSDP2's shards are gathered and its gradients reduced. None chooses a default, or a value for the link.

    A setting that has no effect beside the others raises a ValueError.

    Args:
        all_gather: wire format of parameters. ``"exact"``; ``"bf16"``: 1/2 of float32's bytes; ``"int8"``: 1/4, and one
            scale per ``block`` (ZeRO++'s qwZ); ``"int4"``: 1/8, likewise. All ranks compute with the same rounded
            parameters; the optimizer's parameters and checkpoints stay exact.
        reduce_scatter: likewise, of gradients: each rank's are rounded once, and sums formed in float32. Or
            ``"sparse"``, on CPUs: a module's largest gradient elements (SparDL's Spar-Reduce-Scatter); residuals are
            added in the next step, and cost a float32 copy of the whole gradients on every rank.
        density: with ``"sparse"``, share of its shards' elements that every rank gets, in (0, 1]; 1: all, exactly. Or a
            mapping from patterns to shares, as ``{"layers.0*": 1.0, "*": 0.01}``: the first pattern that fits the name
            of a module wrapped by FSDP2 (the root's is ``""``) decides; a module that fits none is exact. None: 0.01.
        wire: with ``"sparse"``, format of entries: ``"compact"``, four bytes, values in bfloat16 with error feedback;
            ``"exact"``, eight bytes. None: ``"compact"``.
        block: with ``"int8"`` or ``"int4"``, elements that share a scale: a multiple of 4 or 8. Error <= 1/254 or
            1/14.99 of the largest. None: 256 or 128.
        error_feedback: with ``reduce_scatter="int8"`` or ``"int4"``, add the loss of rounding in later steps: all of
            it in the next, or with ``"int4"`` 1/10 of what is left in each. Costs a float32 copy of the whole gradients
            on every rank. None: True.
        defer: on CPUs let reduce-scatters end with the backward, where nothing reads their results earlier; see
            :func:`~fsdp_ext.extend`. False waits for each.
        early: where the backward waits for a module's reduce-scatter (offloading, or ``defer=False``), begin it in
            parts when gradients are ready: on CPUs, exact, modules without other FSDP modules inside. Costs two copies
            of the gradients of the module that runs.
        pending_mb: with ``defer``, most gradients in MiB whose reduce-scatters are under way, before the backward waits
            for the oldest; they are kept whole, as DDP keeps its buckets. None: no limit.
        prefetch: on CPUs, modules whose parameters are gathered ahead of the one that runs; each is whole for longer. 0
            leaves that to FSDP2: none in forward, one in backward. Your own lists on a module stay. None: 2; all if
            every module keeps its parameters whole after forward (``reshard_after_forward=False``).
        lanes: on CPUs, streams of communication side by side, for gathers and for reduce-scatters each. None: chosen by
            a short measurement of the link.
        slice_mb: on CPUs, largest message in MiB, at least 1 KiB: ``slice_mb`` for gathers,
            ``min(slice_mb / 3, 2 * slice_mb / (P - 1))`` for exact reduce-scatters. None: measured, as ``lanes``.
        trace: record spans for :meth:`Extension.timeline`.
        timeout_s: a longer wait fails.
        stall_warning_s: a longer wait is logged, with the name of the collective.
    """

    all_gather: CodecName = "exact"
    reduce_scatter: ScatterName = "exact"
    density: float | Mapping[str, float] | None = None
    wire: Format | None = None
    block: int | None = None
    error_feedback: bool | None = None
    defer: bool = True
    early: bool = True
    pending_mb: float | None = None
    prefetch: int | None = None
    lanes: int | None = None
    slice_mb: float | None = None
    trace: bool = False
    timeout_s: float = 600.0
    stall_warning_s: float = 60.0

    def __post_init__(self) -> None:
        choices = {"all_gather": _GATHERS, "reduce_scatter": _SCATTERS, "wire": (None, *get_args(Format))}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        density = self.density
        densities = list(density.values()) if isinstance(density, Mapping) else [1.0 if density is None else density]
        if not (densities and all(above(each, 0) and each <= 1 for each in densities)):
            raise ValueError(f"density must be None, in (0, 1], or a mapping from patterns to such, got {density!r}")
        multiple = 8 if "int4" in (self.all_gather, self.reduce_scatter) else 4
        if self.block is not None and (not whole(self.block, multiple) or self.block % multiple):
            raise ValueError(f"block must be None, or a multiple of {multiple}, got {self.block!r}")
        if self.error_feedback is not None and not isinstance(self.error_feedback, bool):
            raise ValueError(f"error_feedback must be None, True or False, got {self.error_feedback!r}")
        if self.pending_mb is not None and not positive(self.pending_mb):
            raise ValueError(f"pending_mb must be None, or > 0 and finite, got {self.pending_mb!r}")
        check_slice(self.slice_mb)
        check_waits(self.timeout_s, self.stall_warning_s)
        check_whole(self, lanes=1, prefetch=0)
        check_booleans(self)
        for only, names in ((("sparse",), ("density", "wire")), (_INTEGERS, ("error_feedback",))):
            if self.reduce_scatter not in only:
                formats = " or ".join(f'"{each}"' for each in only)
                refuse_unused(self, names, f'with reduce_scatter="{self.reduce_scatter}", but with {formats}')
        if not {self.all_gather, self.reduce_scatter} & set(_INTEGERS):
            refuse_unused(self, ("block",), 'with neither all_gather nor reduce_scatter "int8" or "int4"')
        if not self.defer:
            refuse_unused(self, ("pending_mb",), "with defer=False, which waits for each reduce-scatter")

    def density_of(self, module: str) -> float:
        """Return the share of its shards' elements that every rank gets of a module's gradients."""
        if self.reduce_scatter != "sparse":
            return 1.0
        if not isinstance(self.density, Mapping):
            return self.density if self.density is not None else _DENSITY
        return next((density for pattern, density in self.density.items() if fnmatchcase(module, pattern)), 1.0)

    @property
    def entries(self) -> Format:
        return self.wire if self.wire is not None else "compact"

    @property
    def scatter_codec(self) -> CodecName:
        return "exact" if self.reduce_scatter == "sparse" else self.reduce_scatter

    def keeps_residuals_of(self, module: str) -> bool:
        return self.density_of(module) < 1 or (self.reduce_scatter in _INTEGERS and self.error_feedback is not False)
