"""Settings that cannot work are refused where they are written.

Prevents: errors of other libraries in the middle of training, and settings that are silently something else.
"""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_ext import ExtConfig

INF = float("inf")


@pytest.mark.parametrize(("changes", "expected"), [
    ({"all_gather": "fp8"}, "all_gather must be one of ('exact', 'bf16', 'int8', 'int4'), got 'fp8'"),
    ({"reduce_scatter": None}, "reduce_scatter must be one of"),
    ({"wire": "tiny"}, "wire must be one of"),
    ({"density": 0}, "density must be None, in (0, 1], or a mapping from patterns to such, got 0"),
    ({"density": 1.5}, "density must be None, in (0, 1], or a mapping from patterns to such, got 1.5"),
    ({"density": "half"}, "density must be None, in (0, 1], or a mapping from patterns to such, got 'half'"),
    ({"density": {"*": 0}}, "density must be None, in (0, 1], or a mapping from patterns to such, got {'*': 0}"),
    ({"density": {}}, "density must be None, in (0, 1], or a mapping from patterns to such, got {}"),
    ({"block": 6}, "block must be None, or a multiple of 4, got 6"),
    ({"block": 0}, "block must be None, or a multiple of 4, got 0"),
    ({"reduce_scatter": "int4", "block": 12}, "block must be None, or a multiple of 8, got 12"),
    ({"block": 8.0}, "block must be None, or a multiple of 4, got 8.0"),
    ({"defer": "no"}, "defer must be True or False, got 'no'"),
    ({"early": 1}, "early must be True or False, got 1"),
    ({"error_feedback": 1}, "error_feedback must be None, True or False, got 1"),
    ({"trace": "yes"}, "trace must be True or False, got 'yes'"),
    ({"timeout_s": 0}, "timeout_s must be > 0 and finite, got 0"),
    ({"timeout_s": None}, "timeout_s must be > 0 and finite, got None"),
    ({"timeout_s": INF}, "timeout_s must be > 0 and finite, got inf"),
    ({"stall_warning_s": None}, "stall_warning_s must be > 0, got None"),
    ({"pending_mb": 0}, "pending_mb must be None, or > 0 and finite, got 0"),
    ({"pending_mb": INF}, "pending_mb must be None, or > 0 and finite, got inf"),
    ({"slice_mb": -1.0}, "slice_mb must be None, or >= 1/1024 (1 KiB) and finite, got -1.0"),
    ({"slice_mb": INF}, "slice_mb must be None, or >= 1/1024 (1 KiB) and finite, got inf"),
    ({"slice_mb": 1e-9}, "slice_mb must be None, or >= 1/1024 (1 KiB) and finite, got 1e-09"),
    ({"slice_mb": float("nan")}, "slice_mb must be None, or >= 1/1024 (1 KiB) and finite, got nan"),
    ({"lanes": 0}, "lanes must be None, or a whole number >= 1, got 0"),
    ({"lanes": 1.5}, "lanes must be None, or a whole number >= 1, got 1.5"),
    ({"lanes": True}, "lanes must be None, or a whole number >= 1, got True"),
    ({"prefetch": "all"}, "prefetch must be None, or a whole number >= 0, got 'all'"),
    ({"prefetch": 2.0}, "prefetch must be None, or a whole number >= 0, got 2.0"),
    ({"prefetch": -1}, "prefetch must be None, or a whole number >= 0, got -1"),
])  # fmt: skip
def test_settings(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError) as caught:
        ExtConfig(**changes)
    assert expected in str(caught.value)


def test_warnings_can_be_left_out() -> None:
    assert ExtConfig(stall_warning_s=INF).stall_warning_s == INF
