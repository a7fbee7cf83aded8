"""What is known about torch's optimizers: of what an update may depend."""

from __future__ import annotations

import torch

from ddp_hooks.comm import torch_compat

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


def find_problem_of_hooks(optimizer: torch.optim.Optimizer) -> str | None:
    """Why hooks of an optimizer would never be called, with a remedy; None if they are."""
    if torch_compat.calls_hooks(optimizer):
        return None
    kind = type(optimizer).__name__
    return (
        f"{kind} does not run the constructor of torch.optim.Optimizer, so its step() calls no hooks: call "
        f"super().__init__(params, defaults) in {kind}.__init__, or take another optimizer. If it wraps one, as "
        f"Accelerate does, pass the inner one, unless {kind} changes parameters itself, as Lookahead does"
    )
