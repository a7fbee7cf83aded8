"""Result of a request: callers wait for it on any thread."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ddp_hooks.coordination.control.request_queue import RequestQueue
from ddp_hooks.coordination.control.submission import Agreement


class Handle:
    """Requested collective; ``result`` returns its result when that is there."""

    def __init__(self, queue: RequestQueue, agreement: Agreement, result: Callable[[], Tensor]) -> None:
        self.queue = queue
        self.agreement = agreement
        self._result = result

    @property
    def label(self) -> str:
        """Name of the request."""
        return self.agreement.name

    @property
    def done(self) -> bool:
        """True if :meth:`wait` returns at once."""
        return self.agreement.done

    @property
    def error(self) -> Exception | None:
        """Error that :meth:`wait` raises, if it is known already."""
        return self.agreement.error

    def wait(self) -> Tensor:
        """Return the result when it is there.

        Raises:
            ValueError: on every rank, if ranks request different collectives under one name.
            LaneError: another rank died, closed its coordinator, or did not make the request in time.
            LaneTimeout: the collective did not end in time.
        """
        self.queue.wait_for(self.agreement)
        return self._result()
