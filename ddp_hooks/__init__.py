"""Synchronous data-parallel training, fast on ordinary networks, from plain PyTorch in one line."""

__version__ = "0.2.0"

from ddp_hooks.comm import LaneError, LaneTimeout, Span
from ddp_hooks.dear import DearConfig, DearState, DearStats, GradScaler, clip_grad_norm_, dear_hook
from ddp_hooks.embedding import (
    EmbeddingState,
    EmbeddingTables,
    RowwiseAdamW,
    ShardedEmbedding,
    TableConfig,
    TableStats,
    embedding_hook,
    shard_embeddings,
)
from ddp_hooks.quantized import QuantizedConfig, QuantizedState, QuantizedStats, quantized_hook
from ddp_hooks.topk import TopKConfig, TopKState, TopKStats, topk_hook
from ddp_hooks.tuning import BucketTuner

__all__ = [
    "BucketTuner",
    "DearConfig",
    "DearState",
    "DearStats",
    "EmbeddingState",
    "EmbeddingTables",
    "GradScaler",
    "LaneError",
    "LaneTimeout",
    "QuantizedConfig",
    "QuantizedState",
    "QuantizedStats",
    "RowwiseAdamW",
    "ShardedEmbedding",
    "Span",
    "TableConfig",
    "TableStats",
    "TopKConfig",
    "TopKState",
    "TopKStats",
    "clip_grad_norm_",
    "dear_hook",
    "embedding_hook",
    "quantized_hook",
    "shard_embeddings",
    "topk_hook",
]
