"""Sparse all-reduce with error feedback: SparDL and the algorithms that it is measured against."""

from ddp_hooks.topk.config import TopKConfig
from ddp_hooks.topk.hook import topk_hook
from ddp_hooks.topk.state import TopKState
from ddp_hooks.topk.stats import TopKStats

__all__ = ["TopKConfig", "TopKState", "TopKStats", "topk_hook"]
