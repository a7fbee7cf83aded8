"""FSDP2's benchmark: the right stock beside each variant, and a page of what was measured.

Prevents: a speed-up over stock FSDP2 that was used in another way.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.benchmarks import fsdp, fsdp_losses
from recipes.benchmarks.harness import Run


@pytest.mark.parametrize(
    ("name", "stock"),
    [
        ("fsdp2", "fsdp2:ahead=False"),
        ("dear", "fsdp2:ahead=False"),
        ("fsdp2-ext:block_mb=5,defer=False", "fsdp2:ahead=False"),
        ("fsdp2-ext:block_mb=5,set_to_none=False", "fsdp2:ahead=False,set_to_none=False"),
        ("fsdp2-ext:replicas=2,all_gather=int8", "fsdp2:ahead=False,replicas=2"),
        ("fsdp2-ext:replicas=2,micro_batches=4,reduce_once=True", "fsdp2:ahead=False,replicas=2,micro_batches=4"),
        ("fsdp2-ext:force_sums=True,defer=False", "fsdp2:ahead=False,force_sums=True"),
    ],
)
def test_stock_is_used_alike(name: str, stock: str) -> None:
    assert fsdp._stock_of(name) == stock
    assert fsdp._stock_of(stock) == stock


@pytest.mark.slow
def test_quick_run_makes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variants = [
        "dear",
        fsdp.STOCK,
        f"{fsdp.STOCK},set_to_none=False",
        fsdp.EXTENDED,
        f"{fsdp.EXTENDED},set_to_none=False",
        f"{fsdp.EXTENDED},all_gather=int8,reduce_scatter=int8",
        f"{fsdp.EXTENDED},replicas=2,micro_batches=3,reduce_once=True",
        "fsdp2-tuned",
    ]
    fsdp.BENCHMARK.run(["--quick", "--loopback", "--variants", *variants, "--output", str(tmp_path)])
    assert "stock" in capsys.readouterr().out
    path, page = tmp_path / "fsdp.json", tmp_path / "page.md"
    (result,) = Run.load(path).results
    assert list(result["windows"]) == variants
    sent = {name: details.get("sent_bytes_per_step") for name, details in result["details"].items()}
    exact, added, int8 = (sent[name] for name in variants[3:6])
    assert exact == added and exact == pytest.approx(result["parameter_bytes"], rel=0.01), "half of both, of two"
    assert int8 == pytest.approx(exact * 260 / 1024, rel=0.05)
    assert sent[fsdp.STOCK] is None and result["details"]["fsdp2-tuned"]["trials"] > 0

    fsdp.BENCHMARK.run(["--results", str(path), "--markdown", str(page)])
    text = page.read_text()
    assert all(f"| `{name}` |" in text for name in variants) and "Tuning found blocks of" in text
    assert "recipes.benchmarks.fsdp --quick" in text and (tmp_path / "page.png").stat().st_size > 10_000


@pytest.mark.slow
def test_losses_of_every_variant_are_those_of_fsdp2(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    fsdp_losses.BENCHMARK.run(["--quick", "--output", str(tmp_path), "--markdown", str(page)])
    stock, int8 = Run.load(tmp_path / "fsdp_losses.json").results
    assert len(stock["losses"]) == 2 and int8["losses"] == pytest.approx(stock["losses"], abs=0.01)
    assert int8["held_out"] == pytest.approx(stock["held_out"], abs=0.01)
    assert "| `both int8` | 2 |" in page.read_text() and (tmp_path / "page.png").exists()
