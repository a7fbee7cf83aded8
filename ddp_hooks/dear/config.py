"""Settings of DeAR, one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from ddp_hooks.comm import CodecName, above, check_booleans, check_slice, check_waits, check_whole, positive
from ddp_hooks.dear.effects import find_setting_without_effect
from ddp_hooks.planning.atoms import Fusion
from ddp_hooks.tuning import BucketTuner

Update: TypeAlias = Literal["sharded", "replicated", "auto"]
Collective: TypeAlias = Literal["direct", "two-level", "auto"]
Wire: TypeAlias = Literal["auto", "exact", "float32", "bf16", "int8", "int4"]
OnNonfinite: TypeAlias = Literal["raise", "skip"]


@dataclass(frozen=True)
class DearConfig:
    """Settings of DeAR: grouping, moving, overlap. None: chosen for the link, the same on every rank.

    A setting that has no effect beside the other ones raises a ValueError, here or when the state is made; a setting
    that asks for the default behaviour is accepted.

    Args:
        update: ``"sharded"``: every rank updates its shard of every parameter, and parameters are gathered; optimizer
            state and work are 1/P. ``"replicated"``: gradients are gathered, and every rank updates whole parameters,
            as in the paper; for optimizers that look at whole tensors. ``"auto"``: sharded for optimizers
            that are known to update every element by itself, else replicated.
        fusion: which neighbouring atoms travel together. ``"size"``: while their total does not exceed ``fusion_mb``
            (DeAR, section IV-B); ``"layers"``: ``fusion_layers`` layers at a time; ``"none"``: every atom alone.
            On CPUs atoms of DDP's last bucket are always reduced alone, as soon as each is ready.
        fusion_mb: largest group in MiB, for ``"size"``. An atom that is larger stands alone. None:
            ``atom_mb``; on links of medium speed ``min(atom_mb, max(model / 16, 4))``.
        fusion_layers: layers per group, for ``"layers"``. None: 4.
        tuner: search for ``fusion_mb`` while training runs, for ``"size"``; see :class:`~ddp_hooks.BucketTuner`. None:
            no search.
        atom_mb: size in MiB at which buckets and parameters are cut; fusion cannot go below it. None:
            ``min(max(4 * slice_mb, 8), max(model / 8, 16))`` (``model / 4`` where the processor limits
            and updates are replicated); less with a tuner, so that it has a choice.
        lanes: streams of communication side by side. None: chosen by a short measurement of the link.
        collective: how ranks exchange on CPUs; NCCL has its own ways. ``"direct"``: every rank with every other; sums
            are ``((g0 + g1) + g2) + ...`` in the order of ranks. ``"two-level"``: first within nodes, then between
            them, where links within are faster; sums are formed within nodes first, ``(g0 + g1) + (g2 + g3)``.
            ``"auto"``: two levels where several hosts hold as many neighbouring ranks each, else direct.
        node_size: ranks per node, for ``"two-level"`` and ``"auto"``. None: as the names of hosts tell. For one or two
            ranks both are the same, so there any size is accepted.
        slice_mb: largest message of all-gathers in MiB, at least 1 KiB; those of reduce-scatters are
            ``min(slice_mb / 3, 2 * slice_mb / (P - 1))``, so that a lane's buffers hold at most ``4 * slice_mb``, with
            any ``wire`` but ``"float32"`` up to three times as much (with two levels of N ranks per node, P - P / N in
            place of P - 1). None: chosen by the same measurement as ``lanes``.
        overlap_forward: gather parameters under the next forward. False waits for them inside ``optimizer.step()``,
            for loops that read parameters outside of any forward.
        assume_elementwise: vouch for an optimizer that is not on the known list: the update of each element depends
            on that element's parameter, gradient and state alone.
        assume_parameterwise: with replicated updates, vouch for an optimizer that is not from ``torch.optim``: the
            update of each parameter depends on that parameter, its gradient and its state alone, so that it may be
            updated by itself, just before it is read. Others wait for all gradients inside of ``step()``.
        wire: how numbers travel. ``"exact"``: float32 gradients that are 16-bit numbers, as those of most weights under
            ``torch.autocast``, in 16 bits, other ones whole, with one level; sums have the same bits. On GPUs a loop
            whose gradients stop being 16-bit numbers, such as one that begins to accumulate, gets a RuntimeError one
            step later, on all ranks; there it has not run yet. ``"auto"``: ``"exact"`` on CPUs with one level, else
            ``"float32"``: whole, without a look at them. ``"bf16"``, ``"int8"``, ``"int4"``: gradients are rounded once
            to so many bits (integers in blocks of 256 with a scale), summed in float32, and what rounding took is added
            to the next gradient (error feedback; a moving average of it for int4). With sharded updates owners step on
            float32 masters of their shards, and gathers move rounded differences between these and the parameters, so
            replicas have the same bits. With replicated updates means travel whole. What rounding took from gradients
            is not saved: a resumed run begins without it.
        reduce_dtype: ``torch.float32`` or ``torch.float64``: convert gradients of a smaller type to it before they are
            summed. None: the type of the gradients.
        master_dtype: with sharded updates of a model in a smaller type, such as bfloat16: let every rank keep its
            shards in this type, update those, and round them to the parameters. None: parameters are updated.
        gather_dtype: ``torch.bfloat16``: with sharded updates of float32 parameters, gather those that the first
            forward in training reads only through the casts of ``torch.autocast`` (``F.linear``, convolutions,
            ``matmul``) in this type: half the bytes, and the same bits in every forward and backward. Owners keep
            float32. A read outside of bfloat16 autocast first gathers all parameters whole, on all ranks together:
            call ``state.synchronize()`` on all ranks before one of them reads alone. bfloat16 parameters, with
            ``master_dtype`` too, travel in 16 bits anyway. None: parameters travel as they are.
        max_grad_norm: clip the gradients' 2-norm to this before every update, see :meth:`DearState.clip_grad_norm_`.
        on_nonfinite: what to do, on all ranks together, if a gradient is infinite or not a number on any of them:
            ``"raise"``, ``"skip"`` the update, or None, nothing, as plain DDP.
        check_replicas: after every step compare the parameters of all ranks, bit for bit, and raise if they differ;
            slow, for finding out which line of a loop parts them. Not with ``gather_dtype``.
        trace: record spans for :meth:`DearState.timeline`.
        timeout_s: a wait that takes longer fails.
        stall_warning_s: a wait that takes longer is logged, with what it waits for.
    """

    update: Update = "sharded"
    fusion: Fusion = "size"
    fusion_mb: float | None = None
    fusion_layers: int | None = None
    tuner: BucketTuner | None = None
    atom_mb: float | None = None
    lanes: int | None = None
    collective: Collective = "direct"
    node_size: int | None = None
    slice_mb: float | None = None
    overlap_forward: bool = True
    assume_elementwise: bool = False
    assume_parameterwise: bool = False
    wire: Wire = "auto"
    reduce_dtype: torch.dtype | None = None
    master_dtype: torch.dtype | None = None
    gather_dtype: torch.dtype | None = None
    max_grad_norm: float | None = None
    on_nonfinite: OnNonfinite | None = None
    check_replicas: bool = False
    trace: bool = False
    timeout_s: float = 600.0
    stall_warning_s: float = 60.0

    @property
    def rounds_to(self) -> CodecName | None:
        """Codec of numbers that travel; None: none is rounded."""
        return None if self.wire == "auto" or self.wire == "exact" or self.wire == "float32" else self.wire

    def __post_init__(self) -> None:
        for name, choices in (("update", Update), ("fusion", Fusion), ("collective", Collective), ("wire", Wire)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name} must be one of {get_args(choices)}, got {getattr(self, name)!r}")
        if self.reduce_dtype not in (None, torch.float32, torch.float64):
            raise ValueError(
                f"reduce_dtype must be None, torch.float32 or torch.float64, got {self.reduce_dtype}: to send "
                f'gradients in fewer bits use wire="bf16"'
            )
        if self.master_dtype not in (None, torch.float32, torch.float64):
            raise ValueError(f"master_dtype must be None, torch.float32 or torch.float64, got {self.master_dtype}")
        if self.gather_dtype not in (None, torch.bfloat16):
            raise ValueError(
                f"gather_dtype must be None or torch.bfloat16 (float16 would round to infinity or 0 what float32 "
                f"holds), got {self.gather_dtype}"
            )
        if self.on_nonfinite is not None and self.on_nonfinite not in get_args(OnNonfinite):
            raise ValueError(f"on_nonfinite must be None or one of {get_args(OnNonfinite)}, got {self.on_nonfinite!r}")
        for name in ("fusion_mb", "atom_mb"):
            if getattr(self, name) is not None and not positive(getattr(self, name)):
                raise ValueError(f"{name} must be None, or > 0 and finite, got {getattr(self, name)!r}")
        if self.max_grad_norm is not None and not above(self.max_grad_norm, 0):
            raise ValueError(f"max_grad_norm must be > 0, got {self.max_grad_norm!r}")
        check_slice(self.slice_mb)
        check_waits(self.timeout_s, self.stall_warning_s)
        check_whole(self, fusion_layers=1, lanes=1, node_size=1)
        check_booleans(self)
        if self.tuner is not None and not isinstance(self.tuner, BucketTuner):
            raise TypeError(f"tuner must be None or a BucketTuner(...), got {type(self.tuner).__name__}")
        if self.tuner is not None and self.fusion != "size":
            raise ValueError(f'tuner searches for fusion_mb, so it needs fusion="size", got {self.fusion!r}')
        without_effect = find_setting_without_effect(self)
        if without_effect is not None:
            raise ValueError(without_effect)
