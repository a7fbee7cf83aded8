"""Learning rates over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Callable


def warmed_cosine(warmup_steps: int, total_steps: int) -> Callable[[int], float]:
    """Return the factor for ``LambdaLR``: a linear warm-up, then half a cosine down to zero."""

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    return factor
