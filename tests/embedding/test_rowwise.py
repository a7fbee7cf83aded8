"""RowwiseAdamW is AdamW where every row has a gradient, and leaves rows alone where one has none.

Prevents: a bias correction of the wrong moment; weight decay of rows that were not used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddp_hooks import RowwiseAdamW


def test_it_is_adamw_for_rows_that_have_gradients() -> None:
    torch.manual_seed(0)
    rows = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))
    dense, before = nn.Parameter(rows.detach()[:3].clone()), rows.detach().clone()
    options: dict[str, Any] = {"lr": 0.1, "betas": (0.7, 0.9), "weight_decay": 0.2}
    ours, theirs = RowwiseAdamW([rows], **options), torch.optim.AdamW([dense], **options)
    for _ in range(4):
        gradient = torch.randn(3, 3, dtype=torch.float64)
        rows.grad = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]), gradient, (4, 3))
        dense.grad = gradient
        ours.step()
        theirs.step()
        torch.testing.assert_close(rows[:3], dense, rtol=1e-12, atol=1e-12)
    assert torch.equal(rows[3], before[3])
