"""Reproductions of the papers: models that match their tables, and differences that a page explains."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.paper import dear_table2, models


@pytest.mark.quick("resnet50-*", "bert-*")
@pytest.mark.parametrize(
    ("model", "num_layers", "num_tensors", "million_parameters"),
    [
        ("resnet50", 107, 161, 25.6),
        ("densenet201", 402, 604, 20.0),
        ("inception_v4", 299, 449, 42.7),
        ("bert", 105, 206, 110.1),
        ("bert_large", 201, 398, 336.2),
    ],
)
def test_models_match_table_1(model: str, num_layers: int, num_tensors: int, million_parameters: float) -> None:
    workload = models.load(model)
    assert (len(workload.layers), workload.num_tensors) == (num_layers, num_tensors)
    assert workload.num_bytes / 4e6 == pytest.approx(million_parameters, abs=0.05)


def test_largest_speedups_are_the_papers() -> None:
    row = dear_table2.simulate_row("10GbE", "bert", 0.0)
    assert row.max_speedup == pytest.approx(25.5, abs=0.05)
    assert row.ratio <= 1.0


@pytest.mark.slow
def test_the_page_has_every_model_and_explains_what_differs(tmp_path: Path) -> None:
    rows = [
        dear_table2.simulate_row(network, "resnet50", alpha_s)
        for network, alphas_s in dear_table2.ALPHAS_S.items()
        for alpha_s in alphas_s
    ]
    dear_table2.write_page(tmp_path / "page.md", rows)
    text = (tmp_path / "page.md").read_text()
    assert text.count("| resnet50 |") == len(rows) == 6 and "<!--" not in text
    explained = text[text.index("## What differs") :]
    assert all(name in explained for name in ("ResNet-50", "DenseNet-201", "Inception-v4", "BERT-Base", "BERT-Large"))


@pytest.mark.slow
def test_what_stands_out_is_what_is_explained() -> None:
    row = dear_table2.simulate_row("10GbE", "bert", dear_table2.ALPHA_S)
    assert row.points < -5 and row.any_schedule < row.paper[1] < row.max_speedup
    dense = [dear_table2.simulate_row(network, "densenet201", dear_table2.ALPHA_S) for network in ("10GbE", "100GbIB")]
    assert all(each.points > 5 for each in dense)
