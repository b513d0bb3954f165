"""Records of datasets as documents: a line of a .jsonl file, or an element of the array in a .json file."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HELD_OUT_ONE_IN = 16
FORMS = (
    '{"text": ...}, {"messages": [{"role": ..., "content": ...}, ...]}, {"prompt": ..., "completion": ...}, '
    '{"instruction": ..., "output": ...} or {"conversations": [{"from": ..., "value": ...}, ...]}'
)
_ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "chatgpt": "assistant"}
"""The speakers of "conversations" (as in ShareGPT) that chat templates call otherwise."""


@dataclass(frozen=True)
class Document:
    """A text, of which what comes behind `prompt` is learned, or a chat, of which the assistant's words are.
    tools: what the assistant may call."""

    text: str = ""
    prompt: str = ""
    messages: Sequence[dict[str, Any]] = ()
    tools: Sequence[dict[str, Any]] = ()

    @property
    def held_out(self) -> bool:
        whole = self.prompt + self.text or json.dumps(self.messages)
        return zlib.crc32(whole.encode()) % HELD_OUT_ONE_IN == 0


def has_form(value: Mapping[str, Any]) -> bool:
    """Returns whether a record has the fields of one of FORMS."""
    return _maker_of(value) is not None


def document_of(value: Any) -> Document:
    """Makes the document of a record. Raises ValueError, KeyError, TypeError or AttributeError for what has
    none of FORMS."""
    if (make := _maker_of(value)) is None:
        raise KeyError(f"none of these fields: {', '.join(value)}"[:100])
    found = make(value)
    texts = [found.text, found.prompt, *(each["role"] for each in found.messages)]
    for each in found.messages:
        if each.get("content") is not None or not each.get("tool_calls"):
            texts.append(each["content"])
    for each in texts:
        if not isinstance(each, str):
            raise TypeError(f"{json.dumps(each)[:60]} is no text")
        each.encode()  # refuses halves of surrogate pairs
    for each in found.tools:
        dict.keys(each)  # refuses what is no description
    return found


def _maker_of(value: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Document] | None:
    return next((make for fields, make in _MAKERS.items() if fields <= value.keys()), None)


def _chat(value: Mapping[str, Any]) -> Document:
    return Document(messages=list(value["messages"]), tools=list(value.get("tools") or ()))


def _completion(value: Mapping[str, Any]) -> Document:
    prompt, completion = value["prompt"], value["completion"]
    if isinstance(prompt, list):  # of messages
        return _chat({**value, "messages": prompt + completion})
    return Document(completion, prompt)


def _instruction(value: Mapping[str, Any]) -> Document:
    asked = "\n\n".join(each for each in (value["instruction"], value.get("input")) if each)
    said = [{"role": "user", "content": asked}, {"role": "assistant", "content": value["output"]}]
    return Document(messages=[*_system(value), *said])


def _conversation(value: Mapping[str, Any]) -> Document:
    said = [
        {"role": _ROLES.get(each["from"], each["from"]), "content": each["value"]} if "from" in each else each
        for each in value["conversations"]
    ]
    return Document(messages=[*_system(value), *said])


def _system(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the message of a record's field "system", if it has some."""
    return [{"role": "system", "content": value["system"]}] if value.get("system") else []


_MAKERS: dict[frozenset[str], Callable[[Mapping[str, Any]], Document]] = {
    frozenset({"messages"}): _chat,
    frozenset({"text"}): lambda value: Document(value["text"]),
    frozenset({"prompt", "completion"}): _completion,
    frozenset({"instruction", "output"}): _instruction,
    frozenset({"conversations"}): _conversation,
}
