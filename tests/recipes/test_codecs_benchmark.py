"""The benchmark of codecs, from end to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipes.benchmarks import codecs


def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    codecs.main(["--numel", "1e5", "--rounds", "1", "--markdown", str(page)])
    names = ("copying", "bf16: encoding", "int8: encoding, error feedback", "int8: decoding", "int8: adding")
    assert "copying" in capsys.readouterr().out and all(name in page.read_text() for name in names)


def test_the_link_below_which_decoding_pays() -> None:
    (row,) = codecs.rows_of({"int8: decoding": [0.001, 0.001, 0.004]}, 256_000, 256)
    # 4 bytes less 1 + 4 / 256 of each element, in a millisecond
    assert row == ("int8: decoding", "1.00", "1.00–4.00", "1.0", f"{8e-9 * 256_000 * (3 - 4 / 256) / 1e-3:.0f}")
