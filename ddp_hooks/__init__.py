"""Synchronous data-parallel training, fast on ordinary networks, from plain PyTorch in one line."""

__version__ = "0.1.0"

from ddp_hooks.comm import LaneError, LaneTimeout, Span
from ddp_hooks.dear import DearConfig, DearState, DearStats, GradScaler, clip_grad_norm_, dear_hook

__all__ = [
    "DearConfig",
    "DearState",
    "DearStats",
    "GradScaler",
    "LaneError",
    "LaneTimeout",
    "Span",
    "clip_grad_norm_",
    "dear_hook",
]
