"""Text files in, batches of token windows out; the same on every machine and for every number of ranks.

1. `find_files` lists the files, sorted, so that the order never depends on the file system.
2. `split_files` holds some of them out. A file's own name decides, so an added file moves no other one.
3. `encode` turns each side into one long array of token ids, with an end-of-text token after each file.
4. `training_batch` draws the windows of one step from (seed, step) alone. Every rank computes all window
   positions and takes its slice, so a run has the same losses at any world size.
5. `inputs_and_targets` selects a rank's tokens from the windows, if several ranks share them (`lm.parallel`).
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import math
import os
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lm.errors import UsageError
from lm.tokenizer import Tokenizer

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
HELD_OUT_ONE_IN = 16
RUN_FILES = ("metrics.jsonl", "options.json", "sample.txt", "checkpoints*")
"""The files that a run writes into its folder; a folder or glob of text leaves them out."""


@dataclass(frozen=True)
class TextFile:
    path: Path
    name: str  # relative to the folder in which it was found; decides its side of the split


def find_files(places: Sequence[str] | None, out: Path | None = None) -> list[TextFile]:
    """Returns the text files named by paths, folders and globs; by default Python's own standard library. If
    a folder or glob contains `out`, the files in `out` are left out, since a run's output is not its text."""
    if not places:
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        return [file for file in _walk(stdlib) if file.path.suffix == ".py"]
    found: dict[Path, TextFile] = {}
    written = None if out is None else out.resolve()
    for place in places:
        if os.path.lexists(place):
            matches, begin = [place], Path(place).resolve()
        else:
            matches, begin = sorted(glob.glob(place, recursive=True)), _before_wildcards(place)
        if not matches:
            raise UsageError(f"--data: no such file or folder: {place}")
        for match in map(Path, matches):
            if match.is_dir():
                files = _walk(match)
            elif _is_text(match):
                files = [TextFile(match, match.name)]
            elif match == Path(place):
                raise UsageError(
                    f"--data: {match} is not a text file: it is empty, holds zero bytes or cannot be read"
                )
            else:
                files = []  # files that a glob names
            named = not match.is_dir() and match == Path(place)
            for file in files:
                path = file.path.resolve()
                if named or written is None or not _is_of_run(path, begin, written):
                    found[path] = file
    if not found:
        raise UsageError(f"--data: no text file in {' '.join(places)}")
    return sorted(found.values(), key=lambda file: (file.name, str(file.path)))


def _before_wildcards(place: str) -> Path:
    """Returns the absolute path of the folder in which a glob begins."""
    plain = itertools.takewhile(lambda part: not glob.has_magic(part), Path(place).parts)
    return Path(*plain).resolve()


def _is_of_run(path: Path, begin: Path, out: Path) -> bool:
    """Returns True for a file that a run into `out` may have written: any file in it, or, where the named
    text begins in `out` itself, a file with one of the program's own names."""
    if out not in path.parents or out in begin.parents:
        return False
    top = path.relative_to(out).parts[0]
    return begin != out or any(fnmatch.fnmatch(top, name) for name in RUN_FILES)


def _walk(folder: Path) -> list[TextFile]:
    files = []
    for parent, folders, names in os.walk(folder):
        # Changed in place, which tells os.walk which folders to skip.
        folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED_FOLDERS]
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    return [TextFile(path, path.relative_to(folder).as_posix()) for path in sorted(files) if _is_text(path)]


def _is_text(path: Path) -> bool:
    """A file counts as text if it is not empty and has no zero byte at its beginning."""
    if not path.is_file():  # a named pipe, for example, would block
        return False
    try:
        with path.open("rb") as stream:
            head = stream.read(4096)
    except OSError:
        return False
    return bool(head) and b"\0" not in head


def split_files(files: list[TextFile]) -> tuple[list[TextFile], list[TextFile]]:
    """Returns (training, validation): a hash of names holds out about one file in sixteen, and at least one.

    Raises UsageError if there is only one file.
    """
    if len(files) < 2:
        raise UsageError(
            f"--data: {files[0].path} is the only text file; one more is needed, as whole files are held out"
        )

    def place(file: TextFile) -> int:
        return zlib.crc32(os.fsencode(file.name))

    held_out = [file for file in files if place(file) % HELD_OUT_ONE_IN == 0]
    if not held_out or len(held_out) == len(files):
        held_out = [min(files, key=place)]
    there = set(held_out)  # a list would take minutes for ten thousands of files
    return [file for file in files if file not in there], held_out


def encode(files: list[TextFile], tokenizer: Tokenizer) -> np.ndarray:
    """Encodes all files in order, each ended by the end-of-text id: (N,) uint16, or uint32 for larger ids."""
    dtype = np.uint16 if tokenizer.vocab <= 1 << 16 else np.uint32
    end = np.asarray([tokenizer.end_of_text], dtype=dtype)
    pieces: list[np.ndarray] = []
    for file in files:
        try:
            data = file.path.read_bytes()
        except OSError as error:
            raise UsageError(f"--data: {error}") from None
        pieces += [tokenizer.encode(data).astype(dtype), end]
    return np.concatenate(pieces)


def training_batch(
    tokens_N: np.ndarray, *, seed: int, step: int, batch: int, seq: int, part: slice
) -> Tensor:
    """Draws a step's windows, (B, S+1) int64: inputs [:, :-1], targets [:, 1:]. `part`: this rank's slice."""
    starts_B = np.random.default_rng((seed, step)).integers(0, len(tokens_N) - seq, size=batch)
    return windows(tokens_N, starts_B[part], seq)


def inputs_and_targets(windows_BS: Tensor, places_S: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns a rank's inputs and targets from windows (B, S + 1): the tokens at its positions of the S, and
    those that follow them. places_S: int64, on the windows' device; None: all positions."""
    inputs_BS, targets_BS = windows_BS[:, :-1], windows_BS[:, 1:]
    if places_S is None:
        return inputs_BS, targets_BS
    return inputs_BS[:, places_S], targets_BS[:, places_S]


def validation_windows(tokens_N: np.ndarray, *, count: int, seq: int) -> np.ndarray:
    """Returns starts of at most `count` disjoint windows, spread evenly over the held-out text."""
    available = (len(tokens_N) - 1) // seq
    return np.linspace(0, available - 1, num=min(count, available)).astype(np.int64) * seq


def windows(tokens_N: np.ndarray, starts_B: np.ndarray, seq: int) -> Tensor:
    """Returns windows of text, (B, S + 1) int64."""
    places_BS = starts_B[:, None] + np.arange(seq + 1)
    return torch.from_numpy(tokens_N[places_BS].astype(np.int64))


def unigram_nats(training_N: np.ndarray, validation_N: np.ndarray, vocab: int) -> float:
    """Returns the mean nats per validation token of the best model without context: token frequencies of the
    training text.

    One is added to every count, so that a token that is new in validation has a large but finite loss.
    """
    seen_V = np.bincount(training_N, minlength=vocab) + 1.0
    asked_V = np.bincount(validation_N, minlength=vocab)
    nats_V = math.log(seen_V.sum()) - np.log(seen_V)
    return float((asked_V * nats_V).sum() / asked_V.sum())
