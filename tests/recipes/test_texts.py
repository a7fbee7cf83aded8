"""Text that recipes learn from: what the command line asks for, or an error that says what to do."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from recipes.common.texts import add_text_arguments, read_texts


def read(*arguments: str) -> list[str]:
    parser = argparse.ArgumentParser()
    add_text_arguments(parser)
    return read_texts(parser.parse_args(arguments))


def test_documentation_is_real_text() -> None:
    texts = read()
    assert sum(len(text) for text in texts) > 100_000
    assert any("for_stmt" in text for text in texts)


def test_text_files_replace_the_documentation(tmp_path: Path) -> None:
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("Once upon a time", encoding="utf-8")
    second.write_text("there was a gradient", encoding="utf-8")
    assert read("--text", str(first), str(second)) == ["Once upon a time", "there was a gradient"]


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"nowhere\.txt.*--text expects"):
        read("--text", str(tmp_path / "nowhere.txt"))


def test_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="found only empty documents"):
        read("--text", str(tmp_path / "empty.txt"))


def test_unreachable_dataset_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route to host")

    monkeypatch.setattr("datasets.load_dataset", unreachable)
    with pytest.raises(SystemExit, match=r"'wikitext'.*no route to host\n.*internet access.*--text"):
        read("--dataset", "wikitext")


def test_dataset_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(name: str, config: str | None, split: str) -> object:
        return datasets.Dataset.from_dict({"line": [f"{name} {config} {split}", " "]})

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    asked = ["--dataset", "mine", "--dataset-config", "small", "--split", "test"]
    assert read(*asked, "--text-column", "line") == ["mine small test"]
    with pytest.raises(SystemExit, match="no column 'text', it has line"):
        read(*asked)
