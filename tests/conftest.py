"""Fixtures shared by all tests."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest

from tests.workers import WorkerPools

# No deadline: time never decides a test, least of all on a busy machine.
hypothesis.settings.register_profile("ddp_hooks", deadline=None)
hypothesis.settings.load_profile("ddp_hooks")


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerPools]:
    """``workers(P)`` is a pool of P gloo ranks that lives as long as the test session."""
    pools = WorkerPools()
    yield pools
    pools.end()
