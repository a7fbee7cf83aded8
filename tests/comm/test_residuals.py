"""Residuals stay with their parameters, whichever buckets these travel in."""

from __future__ import annotations

import torch

from ddp_hooks.comm import Residuals

SIZES = [3, 0, 4, 2, 5]


def residuals() -> Residuals:
    return Residuals([torch.zeros(size) for size in SIZES])


def test_memory_of_a_bucket_stays() -> None:
    kept = residuals()
    bucket = kept.of_bucket([2, 0])
    assert bucket.tolist() == [0.0] * 7 and bucket.dtype == torch.float32
    bucket += torch.arange(7.0)
    assert kept.of_bucket([2, 0]).data_ptr() == bucket.data_ptr()
    assert set(kept.by_parameter()) == {0, 2} and kept.by_parameter()[0].tolist() == [4.0, 5.0, 6.0]


def test_values_follow_their_parameters_into_other_buckets() -> None:
    kept = residuals()
    kept.of_bucket([4, 3]).copy_(torch.tensor([40.0, 41, 42, 43, 44, 30, 31]))
    kept.of_bucket([2, 1, 0]).copy_(torch.tensor([20.0, 21, 22, 23, 0, 1, 2]))
    assert kept.of_bucket([3, 0]).tolist() == [30, 31, 0, 1, 2]
    assert kept.of_bucket([2, 4, 1]).tolist() == [20, 21, 22, 23, 40, 41, 42, 43, 44]
    kept.of_bucket([3, 0]).mul_(-1)
    again = kept.of_bucket([4, 3])
    assert again.tolist() == [40, 41, 42, 43, 44, -30, -31], "the former bucket's memory holds old values"
    assert kept.by_parameter()[0].tolist() == [0, -1, -2]


def test_loaded_values_replace_all() -> None:
    kept = residuals()
    kept.of_bucket([0, 2]).fill_(9.0)
    loaded = torch.tensor([1.0, 2.0, 3.0])
    kept.load({0: loaded})
    assert kept.of_bucket([0, 2]).tolist() == [1, 2, 3, 0, 0, 0, 0]
    kept.of_bucket([0, 2]).zero_()
    assert loaded.tolist() == [1, 2, 3], "the state that was loaded is the user's"


def test_narrow_gradients_have_wide_residuals() -> None:
    types = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    kept = Residuals([torch.zeros(1, dtype=dtype) for dtype in types])
    found = [kept.of_bucket([index]).dtype for index in range(4)]
    assert found == [torch.float32, torch.float32, torch.float32, torch.float64]
