"""The code of accelerators, on CPUs: encoded numbers in the backend's own collectives, the same as on lanes.

Prevents: another rounding there than here; models on accelerators whose exact communication is replaced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fsdp_ext import checks
from tests.support.fsdp_ext import twins
from tests.support.fsdp_ext.native import CASES, HOWS, train
from tests.support.fsdp_ext.twins import CONFIG, with_codecs
from tests.support.workers import WorkerPools


@pytest.mark.quick("exact-bf16-plain", "int8-int8-unused parameters")
@pytest.mark.parametrize(("gather", "scatter", "how"), CASES)
def test_the_same_as_lanes(workers: WorkerPools, gather: Any, scatter: Any, how: str) -> None:
    config = with_codecs(gather, scatter)
    world_size = HOWS[how].get("world_size", 3)
    lanes = workers(world_size).run(train, config, False, HOWS[how])
    native = workers(world_size).run(train, config, True, HOWS[how])
    assert lanes[0]["kinds"] == {"LaneAllGather", "LaneReduceScatter"}
    assert native[0]["kinds"] == {"NativeAllGather", "NativeReduceScatter"}
    assert native[0]["restored"] == {"DefaultAllGather", "DefaultReduceScatter"}
    assert [each["values"] for each in native] == [each["values"] for each in lanes]


def test_exact_communication_stays(workers: WorkerPools) -> None:
    found = workers(2).run(train, CONFIG, True, {})
    assert found[0]["kinds"] == {"DefaultAllGather", "DefaultReduceScatter"}


def sparse_is_refused(rank: int, world_size: int) -> str:
    model = twins.shard(twins.WholeNumbers(world_size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "is_on_cpu", lambda module: False)
        try:
            twins.extend(model, replace(CONFIG, reduce_scatter="sparse"))
        except ValueError as error:
            return str(error)
    return "nothing was raised"


def test_sparse_is_refused(workers: WorkerPools) -> None:
    messages = workers(2).run(sparse_is_refused)
    assert "on an accelerator, where reduce_scatter='sparse' is not supported: take 'int4'" in messages[0]
    assert messages[0] == messages[1]
