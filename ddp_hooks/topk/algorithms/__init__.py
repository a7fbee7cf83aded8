"""Sparse all-reduce algorithms as generators: SparDL and the algorithms that its paper compares it with."""

from ddp_hooks.topk.algorithms.codec import EntryCodec, Format
from ddp_hooks.topk.algorithms.error_feedback import Collection, ErrorFeedback
from ddp_hooks.topk.algorithms.sparse_sum import Name, SparseSum, Sparsity

__all__ = ["Collection", "EntryCodec", "ErrorFeedback", "Format", "Name", "SparseSum", "Sparsity"]
