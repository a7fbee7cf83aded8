"""DeAR: all-reduce split into reduce-scatter under backward and all-gather under the next forward."""

from ddp_hooks.dear.config import DearConfig
from ddp_hooks.dear.hook import dear_hook
from ddp_hooks.dear.state import DearState
from ddp_hooks.dear.stats import DearStats
from ddp_hooks.dear.update.clipping import clip_grad_norm_
from ddp_hooks.dear.update.scaler import GradScaler

__all__ = ["DearConfig", "DearState", "DearStats", "GradScaler", "clip_grad_norm_", "dear_hook"]
