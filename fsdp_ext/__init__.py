"""FSDP2 on ordinary networks: real reduce-scatters and all-gathers that overlap, on gloo too."""

from fsdp_ext.config import ExtConfig
from fsdp_ext.context import ExtStats
from fsdp_ext.extension import Extension, extend, restore, shard_by_size
from fsdp_ext.tuning import TuneConfig, Tuned, tune

__all__ = ["ExtConfig", "ExtStats", "Extension", "TuneConfig", "Tuned", "extend", "restore", "shard_by_size", "tune"]
