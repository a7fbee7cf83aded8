"""Sparse all-reduce without process groups: selection, error feedback, and SparDL with its baselines as generators."""

from ddp_hooks.sparse.codec import EntryCodec, Format
from ddp_hooks.sparse.error_feedback import Collection, ErrorFeedback
from ddp_hooks.sparse.selector import BlockSelector
from ddp_hooks.sparse.sparse_sum import Name, SparseSum, Sparsity
from ddp_hooks.sparse.sparse_vector import SparseVector
from ddp_hooks.sparse.threshold import ChunkedGradient
from ddp_hooks.sparse.two_level import range_counts, sum_between_nodes

__all__ = [
    "BlockSelector", "ChunkedGradient", "Collection", "EntryCodec", "ErrorFeedback", "Format", "Name", "SparseSum",
    "SparseVector", "Sparsity", "range_counts", "sum_between_nodes",
]
