"""Settings that all configurations share are refused alike, where they are written.

Prevents: a wait without an end, or another library's error about it in the middle of training.
"""

from __future__ import annotations

from typing import Any

import pytest

from ddp_hooks import DearConfig, TableConfig, TopKConfig
from ddp_hooks.coordination import CoordinatorConfig
from fsdp_ext import ExtConfig


@pytest.mark.parametrize("config", [CoordinatorConfig, DearConfig, ExtConfig, TableConfig, TopKConfig])
@pytest.mark.parametrize("timeout_s", [0, -1.0, None, "long", float("inf"), float("nan")])
def test_timeouts(config: Any, timeout_s: Any) -> None:
    with pytest.raises(ValueError) as caught:
        config(timeout_s=timeout_s)
    assert str(caught.value) == f"timeout_s must be > 0 and finite, got {timeout_s!r}"


@pytest.mark.parametrize("config", [CoordinatorConfig, DearConfig, ExtConfig])
@pytest.mark.parametrize("slice_mb", [0, 1e-9, "small", float("inf"), float("nan")])
def test_slices(config: Any, slice_mb: Any) -> None:
    with pytest.raises(ValueError) as caught:
        config(slice_mb=slice_mb)
    assert str(caught.value) == f"slice_mb must be None, or >= 1/1024 (1 KiB) and finite, got {slice_mb!r}"
    assert config(slice_mb=1 / 1024).slice_mb == 1 / 1024
