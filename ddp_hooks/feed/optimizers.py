"""What is known about torch's optimizers: of what an update may depend."""

from __future__ import annotations

import torch

# Whose update of an element looks at no other one.
ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in (
        "SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop",
    )
)  # fmt: skip

# Whose update of a parameter looks at no other one.
PARAMETERWISE = ELEMENTWISE + tuple(
    getattr(torch.optim, name) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)
)
