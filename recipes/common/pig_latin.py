"""A parallel corpus for recipes without internet access: sentences of Python's documentation, and their Pig Latin.

The sentences are real; the other language is a cipher, which changes each word by itself and keeps their order. A model
that translates it well has learned where to look and what words mean, but no grammar: figures say nothing about
translation between real languages.
"""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from recipes.common.texts import python_documentation

MIN_WORDS, MAX_WORDS = 4, 16  # of a sentence, marks included
_MARKS = ".,;:!?"


def pig_latin_corpus() -> list[tuple[str, str]]:
    """Return pairs of a sentence and its Pig Latin, each once; the same with the same version of Python."""
    found = dict.fromkeys(sentences([*python_documentation(), *docstrings()]))
    return [(sentence, pig_latin(sentence)) for sentence in found]


def docstrings() -> list[str]:
    """Return docstrings of Python's standard library: of modules that are single files, their classes and functions."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    trees = [ast.parse(path.read_bytes()) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for node in nodes if (text := ast.get_docstring(node))]


def sentences(texts: Iterable[str]) -> Iterator[str]:
    """Yield sentences of prose in small letters, words and marks parted by spaces; sentences with code are left out."""
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            for sentence in re.split(rf"(?<=[{_MARKS}])\s+(?=[A-Z])", " ".join(paragraph.split())):
                words = re.findall(rf"[a-z]+|[{_MARKS}]", sentence.lower())
                if MIN_WORDS <= len(words) <= MAX_WORDS and _is_prose(sentence):
                    yield " ".join(words)


def _is_prose(sentence: str) -> bool:
    plain = sum(character.isalpha() or character in f" {_MARKS}" for character in sentence)
    return plain >= 0.9 * len(sentence)


def pig_latin(sentence: str) -> str:
    """Move the first consonants of each word to its end, and "ay" behind them; "way" if there are none."""
    return " ".join(_pig_latin_word(word) if word.isalpha() else word for word in sentence.split())


def _pig_latin_word(word: str) -> str:
    begins = re.match(r"qu|y?[^aeiouy]*(?:(?<=q)u)?", word)
    assert begins is not None
    first = begins.group()
    return f"{word[len(first) :]}{first}ay" if first else f"{word}way"
