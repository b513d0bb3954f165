"""Files of a run that are written anew."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Puts a file of this text in the place of an earlier one, which stays if the process ends before."""
    part = path.with_name(f".{path.name}")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
