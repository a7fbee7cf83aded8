"""FSDP2 on ordinary networks: real reduce-scatters and all-gathers that overlap, on gloo too."""

from fsdp_ext.config import ExtConfig
from fsdp_ext.extension import Extension, extend, restore
from fsdp_ext.stats import ExtStats

__all__ = ["ExtConfig", "ExtStats", "Extension", "extend", "restore"]
