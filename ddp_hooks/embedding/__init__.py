"""Embedding tables that travel by row (li2022embrace)."""

from ddp_hooks.embedding.config import TableConfig
from ddp_hooks.embedding.module import ShardedEmbedding
from ddp_hooks.embedding.replicated import EmbeddingState, embedding_hook
from ddp_hooks.embedding.rowwise import RowwiseAdamW
from ddp_hooks.embedding.shard import shard_embeddings
from ddp_hooks.embedding.stats import TableStats
from ddp_hooks.embedding.tables import EmbeddingTables

__all__ = [
    "EmbeddingState",
    "EmbeddingTables",
    "RowwiseAdamW",
    "ShardedEmbedding",
    "TableConfig",
    "TableStats",
    "embedding_hook",
    "shard_embeddings",
]
