"""Converts text to token ids and back: as bytes, or by a vocabulary of the `tokenizers` library."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from lm.errors import UsageError


class ByteTokenizer:
    """Token id = byte value, and 256 for the end of a text: needs no training, and knows every text."""

    vocab = 257
    end_of_text = 256

    def encode(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, dtype=np.uint8)

    def decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


class LibraryTokenizer:
    """A `tokenizer.json` of the `tokenizers` library, with one more id for the end of a text."""

    def __init__(self, path: str) -> None:
        self._tokenizer: Any = load_tokenizer_file(path)
        self.end_of_text = max(self._tokenizer.get_vocab().values(), default=-1) + 1  # there may be gaps
        self.vocab = self.end_of_text + 1

    def encode(self, data: bytes) -> np.ndarray:
        text = data.decode("utf-8", errors="replace")
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode([i for i in ids if i < self.end_of_text]))


def load_tokenizer_file(path: str) -> Any:
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError:
        raise UsageError("--tokenizer needs the tokenizers library: pip install tokenizers") from None
    if not Path(path).is_file():
        raise UsageError(f"--tokenizer: no such file: {path}")
    try:
        return tokenizers.Tokenizer.from_file(path)
    except Exception as error:  # the library raises a bare Exception for any problem with the file
        raise UsageError(f"--tokenizer: {path}: {error}") from None


Tokenizer = ByteTokenizer | LibraryTokenizer


def make_tokenizer(path: str | None) -> Tokenizer:
    return LibraryTokenizer(path) if path else ByteTokenizer()
