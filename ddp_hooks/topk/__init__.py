"""Sparse all-reduce with error feedback: SparDL and the algorithms that its paper compares it with."""

from ddp_hooks.topk.config import TopKConfig
from ddp_hooks.topk.hook import topk_hook
from ddp_hooks.topk.reduction.steps import TopKStats
from ddp_hooks.topk.state import TopKState

__all__ = ["TopKConfig", "TopKState", "TopKStats", "topk_hook"]
