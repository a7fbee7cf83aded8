"""Fixtures shared by all tests."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.support.workers import WorkerPools

# No deadline: time never decides a test, least of all on a busy machine.
hypothesis.settings.register_profile("ddp_hooks", deadline=None)
hypothesis.settings.load_profile("ddp_hooks")


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPools]:
    """``workers(P)`` is a pool of P gloo ranks that lives as long as the test session."""
    pools = WorkerPools()
    yield pools
    pools.end()


@pytest.fixture(scope="session")
def gpu_workers() -> Iterator[WorkerPools]:
    """``gpu_workers(P)`` is a pool of P NCCL ranks; see :mod:`tests.support.devices`."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    pools = WorkerPools("cuda")
    yield pools
    pools.end()


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each case as slow that the ``quick`` mark of its test does not match."""
    unknown: dict[str, set[str]] = {}
    for item in items:
        mark = item.get_closest_marker("quick")
        if mark is None or not isinstance(item, pytest.Function):
            continue
        case = item.callspec.id if hasattr(item, "callspec") else ""
        patterns = unknown.setdefault(item.nodeid.split("[")[0], set(mark.args))
        matching = {pattern for pattern in mark.args if fnmatch.fnmatchcase(case, pattern)}
        patterns -= matching
        if not matching and item.get_closest_marker("slow") is None:
            item.add_marker(pytest.mark.slow)
    if not any("::" in argument for argument in config.args) and any(unknown.values()):
        named = {test: sorted(patterns) for test, patterns in unknown.items() if patterns}
        raise pytest.UsageError(f"the quick marks of these tests match none of their cases: {named}")
