"""Text as windows of tokens: files in, packed windows out.

1. Each file is a document; so is each line of a .jsonl file, and each element of an array of objects in a
   .json file (records.py has their forms). Of chats only the assistant's words are learned.
2. A hash of its text puts each document into the training set or the held-out set.
3. `Windows` concatenates them and cuts windows of `seq` tokens. A document, or the rest of it in a further
   window, begins at position 0, by which run.py separates the attention of documents. Neither a prompt is a
   target nor the first token of a document.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from jinja2 import TemplateError
from lm.errors import UsageError
from torch import Tensor
from torch.utils.data import Dataset

from finetune.records import FORMS, HELD_OUT_ONE_IN, Document, document_of, has_form

NO_TARGET = -100
SUFFIXES = (".txt", ".md", ".rst", ".py", ".json", ".jsonl")


def read_documents(places: Sequence[str]) -> list[Document]:
    """Returns the documents of files and folders, in the order of their names. Raises UsageError for a
    missing path, for a malformed line, and if there are no documents."""
    found: list[Document] = []
    named = {Path(place).expanduser() for place in places}
    for file in find_files(places):
        try:
            text = file.read_text(encoding="utf-8-sig")  # some editors begin files by a mark
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"TEXT: {file}: {error}") from None
        if file.suffix == ".jsonl":
            found += _lines(file, text)
        elif (records := _array(file, text, named)) is not None:
            found += records
        elif text.strip():
            found.append(Document(text))
    if not found:
        raise UsageError(f"TEXT: nothing in {' '.join(places)} (files named {' '.join(SUFFIXES)})")
    return found


def find_files(places: Sequence[str]) -> list[Path]:
    """Returns the named files, and those of named folders. Raises UsageError for a missing path."""
    found: list[Path] = []
    for place in places:
        path = Path(place).expanduser()
        if not path.exists():
            raise UsageError(f"TEXT: there is no {place}")
        if path.is_file():
            found.append(path)
        else:
            found += sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    return found


def _lines(file: Path, text: str) -> Iterator[Document]:
    for number, line in enumerate(text.split("\n"), 1):  # other line separators may stand within a string
        if not line.strip():
            continue
        yield _document(f"{file}, line {number}", line)


def _array(file: Path, text: str, named: set[Path]) -> list[Document] | None:
    """Returns the documents of a .json file's array of objects; None for another file. Raises UsageError for
    objects without a known form, if the file was named and not found in a folder."""
    if file.suffix != ".json":
        return None
    try:
        values = json.loads(text)
    except ValueError:
        return None
    if not isinstance(values, list) or not values or not all(isinstance(each, dict) for each in values):
        return None
    if file not in named and not any(map(has_form, values)):
        return None
    return [_document(f"{file}, element {number}", value) for number, value in enumerate(values, 1)]


def _document(where: str, record: str | dict[str, Any]) -> Document:
    """Returns the document of a record, or of its JSON. Raises UsageError."""
    try:
        return document_of(json.loads(record) if isinstance(record, str) else record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__} {error}"
        raise UsageError(f"TEXT: {where} must be {FORMS}: {why}") from None


def encode(document: Document, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Returns sequences of tokens, each with its targets: the tokens themselves, or NO_TARGET. A chat is one,
    unless its template changes answers when others follow (that of Qwen3 leaves out their thoughts): then
    each answer is one, with all that came before it. Raises UsageError for messages where the tokenizer has
    no chat template."""
    if not document.messages:
        return _encode_text(document, tokenizer)
    if tokenizer.chat_template is None:
        raise UsageError("TEXT has messages, and the model's tokenizer no chat template: bring plain text")
    found: list[tuple[list[int], list[int]]] = []
    for place, message in enumerate(document.messages):
        if message["role"] != "assistant" or not place:  # a greeting answers nobody
            continue
        given = _render(document, place, tokenizer, add_generation_prompt=True)
        whole = _render(document, place + 1, tokenizer)
        if whole[: len(given)] != given:
            raise UsageError(
                "TEXT has messages, and the model's chat template does not put an answer where it asks for "
                "one: bring plain text"
            )
        if not found or given[: len(found[-1][0])] != found[-1][0]:
            found.append(([], []))
        before, targets = found[-1]
        unlearned = [NO_TARGET] * (len(given) - len(before))
        found[-1] = whole, [*targets, *unlearned, *whole[len(given) :]]
    return found


def _encode_text(document: Document, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """Returns what `encode` does, for a text and the prompt before it. Each has the tokens that it has alone,
    as when the model goes on from a prompt."""
    prompt, learned = (
        list(tokenizer(each, add_special_tokens=False)["input_ids"])
        for each in (document.prompt, document.text)
    )
    if tokenizer.eos_token_id is not None:
        learned.append(tokenizer.eos_token_id)
    tokens, unlearned = prompt + learned, max(1, len(prompt))
    return [(tokens, [NO_TARGET] * unlearned + tokens[unlearned:])] if tokens else []


def _render(document: Document, count: int, tokenizer: Any, **options: Any) -> list[int]:
    """Returns the tokens of a chat's first `count` messages."""
    messages, tools = list(document.messages[:count]), list(document.tools) or None
    try:
        return list(
            tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False, **options)
        )
    except (TemplateError, TypeError) as error:  # many templates refuse roles that do not alternate
        raise UsageError(
            f"TEXT has messages that the model's chat template refuses: {error}: {json.dumps(messages)[:200]}"
        ) from None


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of `seq` tokens that have a target, with their targets and positions."""

    def __init__(self, documents: Sequence[Document], tokenizer: Any, seq: int) -> None:
        tokens: list[int] = []
        targets: list[int] = []
        positions: list[int] = []
        for document in documents:
            for ids, wanted in encode(document, tokenizer):
                tokens += ids
                targets += wanted
                positions += range(len(ids))
        count = len(tokens) // seq
        found = [
            torch.tensor(each[: count * seq], dtype=torch.int64).view(count, seq)
            for each in (tokens, targets, positions)
        ]
        # A window without a target, as there are in a long question, would have a loss of 0 / 0.
        learned_W = (found[1][:, 1:] != NO_TARGET).any(1)
        self.tokens_WS, self.targets_WS, self.positions_WS = (each[learned_W] for each in found)
        # Positions of a long document would pass those that the model knows.
        own = torch.arange(seq)
        goes_on = self.positions_WS - self.positions_WS[:, :1] == own
        self.positions_WS = torch.where(goes_on, own, self.positions_WS)

    def __len__(self) -> int:
        return len(self.tokens_WS)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.tokens_WS[place],
            "labels": self.targets_WS[place],
            "position_ids": self.positions_WS[place],
        }


class InOrder(Dataset[dict[str, Tensor]]):
    """`count` windows of a run, from its window number `begin` on. A run goes through all windows, then
    through all in another order, and so on, however many ranks take them."""

    def __init__(self, windows: Windows, seed: int, begin: int, count: int) -> None:
        self.windows, self._seed, self._begin, self._count = windows, seed, begin, count
        self._turn, self._order = -1, [0]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if not 0 <= number < self._count:
            raise IndexError(number)
        turn, place = divmod(self._begin + number, len(self.windows))
        if turn != self._turn:
            random = numpy.random.default_rng([self._seed, turn])
            self._turn, self._order = turn, random.permutation(len(self.windows)).tolist()
        return self.windows[self._order[place]]


def split(documents: Sequence[Document], tokenizer: Any, seq: int, least: int) -> tuple[Windows, Windows]:
    """Returns the training windows and the held-out ones. If the documents of one side do not fill a window,
    or more would be held out than trained on, the last windows of all are held out. Raises UsageError for
    fewer than `least` training windows."""
    training = Windows([each for each in documents if not each.held_out], tokenizer, seq)
    held_out = Windows([each for each in documents if each.held_out], tokenizer, seq)
    if not len(held_out) or len(training) < len(held_out):
        training, held_out = Windows(documents, tokenizer, seq), Windows([], tokenizer, seq)
        last = max(1, len(training) // HELD_OUT_ONE_IN)
        for name in ("tokens_WS", "targets_WS", "positions_WS"):
            whole = getattr(training, name)
            setattr(training, name, whole[:-last])
            setattr(held_out, name, whole[-last:])
    if len(training) < least:
        raise UsageError(
            f"TEXT has {len(training)} windows of --seq {seq} tokens to train on, a step takes {least}: "
            "bring more text (of messages the assistant's are learned), or a smaller --seq, --batch or "
            "--accumulate"
        )
    return training, held_out
