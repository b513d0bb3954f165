"""The text of a run: training and validation text as token ids, and their baseline loss."""

from __future__ import annotations

import zlib
from pathlib import Path

from lm import data
from lm.errors import UsageError
from lm.options import Options
from lm.tokenizer import make_tokenizer


class Corpus:
    """Training and validation text as token ids, and the loss of the unigram model (token frequencies)."""

    def __init__(self, options: Options) -> None:
        self.tokenizer = make_tokenizer(options.tokenizer)
        self.training_files, self.validation_files = data.split_files(
            data.find_files(options.data, Path(options.out))
        )
        self.training_N = data.encode(self.training_files, self.tokenizer)
        self.validation_N = data.encode(self.validation_files, self.tokenizer)
        for side, tokens_N in (("training", self.training_N), ("held-out", self.validation_N)):
            if len(tokens_N) <= options.seq:
                raise UsageError(
                    f"--data: {len(tokens_N)} tokens of {side} text, --seq {options.seq} needs more: give "
                    "more text, or a smaller --seq"
                )
        self.unigram = data.unigram_nats(self.training_N, self.validation_N, self.tokenizer.vocab)

    @property
    def fingerprint(self) -> int:
        return zlib.crc32(self.validation_N.data, zlib.crc32(self.training_N.data))

    def describe(self) -> str:
        return (
            f"text: {len(self.training_files):,} files, {len(self.training_N):,} tokens for training; "
            f"{len(self.validation_files):,} files, {len(self.validation_N):,} tokens held out; "
            f"vocabulary {self.tokenizer.vocab:,}; unigram baseline {self.unigram:.3f} nats"
        )
