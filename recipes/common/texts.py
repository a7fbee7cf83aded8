"""Text to train on: Python's own documentation, files, or a Hugging Face dataset, as the command line says."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`read_texts` reads."""
    text = parser.add_argument_group("text (default: Python's documentation)")
    source = text.add_mutually_exclusive_group()
    source.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="UTF-8 text files")
    source.add_argument("--dataset", metavar="NAME", help="a Hugging Face dataset")
    text.add_argument("--dataset-config", metavar="NAME", help="its configuration")
    text.add_argument("--split", default="train", help="its split")
    text.add_argument("--text-column", default="text", metavar="NAME", help="its column with the text")


def read_texts(args: argparse.Namespace) -> list[str]:
    """Return the documents that the command line asks for; exit with a message if there are none."""
    if args.text:
        texts = [read_file(path) for path in args.text]
    elif args.dataset:
        texts = read_dataset(args.dataset, args.dataset_config, args.split, args.text_column)
    else:
        texts = python_documentation()
    texts = [text for text in texts if text.strip()]
    if not texts:
        raise SystemExit("error: expected text to learn from, found only empty documents")
    return texts


def python_documentation() -> list[str]:
    """Return the language reference behind Python's ``help()``: 80 topics, about 500 kB."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise SystemExit(
            "error: this Python comes without its documentation (pydoc_data); pass --text FILE…"
        ) from error
    return list(topics.values())


def read_file(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"error: cannot read {path}: {error}. --text expects readable UTF-8 text files") from error


def read_dataset(name: str, config: str | None, split: str, text_column: str) -> list[str]:
    """Return one column of a Hugging Face dataset, downloaded on first use.

    Workers of the emulated cluster reach only each other: run once outside to fill the cache.
    """
    from datasets import load_dataset  # takes seconds to import, and only this needs it

    try:
        dataset = load_dataset(name, config, split=split)
    except Exception as error:  # network, access rights, unknown name, configuration or split
        raise SystemExit(
            f"error: cannot load the dataset {name!r} (configuration {config!r}, split {split!r}): {error}\n"
            "Check the name, --dataset-config and --split. It needs internet access on first use, and "
            "`hf auth login` if it is private. Without access, pass --text FILE…"
        ) from error
    if text_column not in dataset.column_names:
        raise SystemExit(
            f"error: the dataset {name!r} has no column {text_column!r}, it has "
            f"{', '.join(dataset.column_names)}; name one of them with --text-column"
        )
    return list(dataset[text_column])


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
