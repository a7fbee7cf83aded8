"""Largest entries of a vector, found without sorting it. No communication."""

from ddp_hooks.topk.selection.selector import BlockSelector
from ddp_hooks.topk.selection.sparse_vector import SparseVector
from ddp_hooks.topk.selection.threshold import ChunkedGradient, add_and_threshold

__all__ = ["BlockSelector", "ChunkedGradient", "SparseVector", "add_and_threshold"]
