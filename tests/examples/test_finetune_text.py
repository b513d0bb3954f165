"""The text that examples/finetune_hf.py learns: files, records of datasets, chats, windows."""

import copy
import json
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch

for package in ("transformers", "accelerate", "peft", "tensorboard"):
    pytest.importorskip(package)

from finetune import demo, text  # noqa: E402  isort: skip
from lm.errors import UsageError  # noqa: E402  isort: skip


def chat_of(*said: str) -> list[dict[str, str]]:
    """Returns a chat of what the user and the assistant have said, in turns."""
    return [{"role": role, "content": each} for each, role in zip(said, cycle(("user", "assistant")))]


def test_windows_hold_documents_one_behind_the_other(tokenizer: Any) -> None:
    documents = [text.Document("one two three"), text.Document("four")]
    ids = [text.encode(each, tokenizer)[0][0] for each in documents]
    assert [each[-1] for each in ids] == [tokenizer.eos_token_id] * 2
    windows = text.Windows(documents, tokenizer, seq=sum(map(len, ids)))
    only = windows[0]
    assert len(windows) == 1 and only["input_ids"].tolist() == ids[0] + ids[1]
    assert only["position_ids"].tolist() == [*range(len(ids[0])), *range(len(ids[1]))]
    targets = only["labels"].tolist()
    for begin, document in zip((0, len(ids[0])), ids, strict=True):  # none is foretold from the one before
        assert targets[begin : begin + len(document)] == [text.NO_TARGET, *document[1:]]
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None  # then a document may have no token
    assert text.encode(text.Document(""), endless) == []


def test_of_a_chat_the_answers_are_learned(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = chat_of("What is 2 + 2?", "Four.", "And 3 + 3?", "Six.")
    [(tokens, targets)] = text.encode(text.Document(messages=chat), tokenizer)
    assert tokenizer.decode(tokens) == tokenizer.apply_chat_template(chat, tokenize=False)
    learned = [token for token, target in zip(tokens, targets, strict=True) if target != text.NO_TARGET]
    assert tokenizer.decode(learned) == "Four.<|end|>\nSix.<|end|>\n"
    assert all(target in (token, text.NO_TARGET) for token, target in zip(tokens, targets, strict=True))
    greeted = text.Document(messages=[{"role": "assistant", "content": "Hello."}, *chat])
    [(tokens, targets)] = text.encode(greeted, tokenizer)  # the greeting is read, and not learned
    assert tokenizer.decode([each for each in targets if each != text.NO_TARGET]).startswith("Four.")
    assert "Hello." in tokenizer.decode(tokens)
    assert text.encode(text.Document(messages=greeted.messages[:1]), tokenizer) == []
    windows = text.Windows([text.Document(messages=chat_of("why " * 99, "So."))], tokenizer, 16)
    assert len(windows) == 1  # not those of the question alone, whose loss would be 0 / 0
    for template, says in (
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "refuses: roles must alternate: .*What is 2"),
        ("{% if add_generation_prompt %}A:{% else %}{{ messages[-1].content }}{% endif %}", "where it asks"),
    ):
        monkeypatch.setattr(tokenizer, "chat_template", template)
        with pytest.raises(UsageError, match=says):
            text.encode(text.Document(messages=chat), tokenizer)


def test_answers_that_a_template_changes_later_are_learned_one_by_one(tokenizer: Any) -> None:
    """Qwen3's template thinks in the last answer alone; gpt-oss's ends that one by another token."""
    changing = copy.deepcopy(tokenizer)
    changing.chat_template = demo.CHAT.replace(
        "<|end|>", "{{ '<|end|>' if loop.last and not add_generation_prompt else '<|more|>' }}"
    )
    chat = text.Document(messages=chat_of("2 + 2?", "Four.", "3 + 3?", "Six.", "Thanks."))
    found = text.encode(chat, changing)
    for (tokens, targets), count, answer in zip(found, (2, 4), ("Four.", "Six."), strict=True):
        whole = changing.apply_chat_template(chat.messages[:count], tokenize=False)
        assert changing.decode(tokens) == whole
        learned = [target for target in targets if target != text.NO_TARGET]
        assert changing.decode(learned) == f"{answer}<|end|>\n" and len(tokens) == len(targets)
        assert targets[-len(learned) :] == learned == tokens[-len(learned) :]


def test_tools_stand_before_a_chat_that_calls_them(tokenizer: Any, tmp_path: Path) -> None:
    """A call is learned, what the tool answers is not; a call may have no content, null or missing."""
    calling = copy.deepcopy(tokenizer)
    calling.chat_template = (
        "{% for tool in tools or [] %}can {{ tool.function.name }}\n{% endfor %}{% for m in messages %}"
        "{{ m.role }}:\n{% for c in m.tool_calls or [] %}call {{ c.function.name }}{% endfor %}"
        "{{ m.content or '' }}\n{% endfor %}{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add"}}]}
    for sparse in (call, {**call, "content": None}):
        told = [{"role": "user", "content": "2 + 2?"}, sparse, {"role": "tool", "content": "4"}]
        line = {"messages": [*told, {"role": "assistant", "content": "Four."}]}
        line["tools"] = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
        (tmp_path / "a.jsonl").write_text(json.dumps(line) + "\n")
        [(tokens, targets)] = text.encode(*text.read_documents([str(tmp_path)]), calling)
        said = "can add\nuser:\n2 + 2?\nassistant:\ncall add\ntool:\n4\nassistant:\nFour.\n"
        assert calling.decode(tokens) == said
        learned = [target for target in targets if target != text.NO_TARGET]
        assert calling.decode(learned) == "call add\nFour.\n"


def test_files_and_lines_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain", encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text(
        '{"text": "of a line"}\n\n{"messages": [{"role": "user", "content": "hi", "name": "Eve"}]}\n'
    )
    (tmp_path / "c.bin").write_bytes(b"\xff\0")
    (tmp_path / "d.jsonl").write_text('{"text": "one\u2028line"}\n', encoding="utf-8")
    (tmp_path / "e.md").mkdir()
    found = text.read_documents([str(tmp_path)])
    assert [each.text for each in found] == ["plain", "of a line", "", "one\u2028line"]
    assert found[2].messages == [{"role": "user", "content": "hi", "name": "Eve"}]


def test_records_of_datasets_are_chats(tmp_path: Path) -> None:
    """The forms of TRL, Alpaca and ShareGPT, in an array or line by line."""
    asked, said = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
    briefly = {"role": "system", "content": "Be brief."}
    records: dict[str, tuple[dict[str, Any], list[dict[str, str]]]] = {
        "messages": ({"prompt": [briefly, asked], "completion": [said]}, [briefly, asked, said]),
        "alpaca": ({"instruction": "2 + 2?", "input": "", "output": "4"}, [asked, said]),
        "input": (
            {"instruction": "Add", "input": "2, 2", "output": "4", "system": "Be brief."},
            [briefly, {"role": "user", "content": "Add\n\n2, 2"}, said],
        ),
        "sharegpt": (
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "human", "value": "2 + 2?"},
                    {"from": "gpt", "value": "4"},
                ]
            },
            [briefly, asked, said],
        ),
        "roles": ({"system": "Be brief.", "conversations": [asked, said]}, [briefly, asked, said]),
    }
    for name, (record, messages) in records.items():
        (tmp_path / "a.json").write_text(json.dumps([record, {"text": "more"}]))
        (tmp_path / "b.jsonl").write_text(json.dumps(record) + "\n")
        first, more, last = text.read_documents([str(tmp_path)])
        assert first.messages == last.messages == messages, name
        assert more.text == "more"


def test_a_completion_is_learned_behind_its_prompt(tmp_path: Path, tokenizer: Any) -> None:
    """Without a chat template, as TRL takes prompts that are texts."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "2 + 2? ", "completion": "It is 4."}\n')
    [(tokens, targets)] = text.encode(*text.read_documents([str(tmp_path)]), tokenizer)
    assert tokenizer.decode(tokens) == "2 + 2? It is 4.<|end|>"
    learned = [target for target in targets if target != text.NO_TARGET]
    assert tokenizer.decode(learned) == "It is 4.<|end|>" and tokens[-len(learned) :] == learned


def test_other_json_is_text(tmp_path: Path) -> None:
    for number, content in enumerate(('{"text": "x"}', '["text"]', "[]", "[{]", '[{"name": "x"}]')):
        (tmp_path / f"{number}.json").write_text(content)
    found = text.read_documents([str(tmp_path)])
    assert [each.text for each in found] == ['{"text": "x"}', '["text"]', "[]", "[{]", '[{"name": "x"}]']


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"text": "x"}\n{"prompt": "y"}\n', r"a.jsonl, line 2 must be .*none of these.* prompt"),
        ("a.json", '[{"text": "x"}, {"prompt": "y"}]', r"a.json, element 2 must be .*none of these.* prompt"),
        ("a.json", '[{"question": "y"}]', r"a.json, element 1 must be .*none of these.* question"),
        ("a.jsonl", '{"prompt": "y", "completion": 7}', "line 1 must be .*7 is no text"),
        ("a.jsonl", '{"instruction": 7, "output": "y"}', "line 1 must be .*TypeError"),
        ("a.jsonl", '{"conversations": [{"from": "gpt"}]}', "line 1 must be .*KeyError 'value'"),
        ("a.jsonl", "no json\n", "line 1 must be"),
        ("a.jsonl", '{"messages": [{"role": "user"}]}\n', "line 1 must be .*content"),
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": null}]}\n', "line 1 must be .*TypeError"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', r"\[.*\] is no text"),
        ("a.jsonl", '{"messages": [], "tools": ["add"]}\n', "line 1 must be .*TypeError"),
        ("a.jsonl", '{"messages": ["hi"]}\n', "line 1 must be .*(TypeError|AttributeError)"),
        ("a.jsonl", '{"messages": [{"role": 3, "content": "x"}]}\n', "line 1 must be .*TypeError"),
        ("a.jsonl", r'{"text": "half an emoji \ud83d"}', "line 1 must be .*surrogates not allowed"),
        ("a.txt", b"\xff\xfe\x00", "a.txt: .*utf-8"),
        ("a.txt", "  \n", "nothing in"),
    ],
)
def test_what_is_no_text_is_told(tmp_path: Path, name: str, content: str | bytes, says: str) -> None:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UsageError, match=says):
        text.read_documents([str(file)])


@pytest.mark.parametrize("parts", [[23], [4, 6, 13], [10, 1, 12]])
def test_a_run_takes_all_windows_in_turn_however_it_is_cut(
    parts: list[int], tokenizer: Any, seed: int
) -> None:
    words = " ".join(map(str, range(60)))
    windows, seed = text.Windows([text.Document(words)], tokenizer, 16), seed % 2**32
    count = len(windows)
    assert 4 < count < 12, count
    whole = [each["input_ids"].tolist() for each in text.InOrder(windows, seed, 0, 23)]
    found, begin = [], 0
    for part in parts:
        found += [each["input_ids"].tolist() for each in text.InOrder(windows, seed, begin, part)]
        begin += part
    every = sorted(windows.tokens_WS.tolist())
    assert found == whole and sorted(whole[:count]) == sorted(whole[count : 2 * count]) == every
    assert whole != [each["input_ids"].tolist() for each in text.InOrder(windows, seed + 1, 0, 23)]


def test_a_split_holds_out_whole_documents_or_the_last_windows(tokenizer: Any) -> None:
    many = [text.Document(f"document {number} " * 20) for number in range(64)]
    training, held_out = text.split(many, tokenizer, 16, 1)
    seen = {tokenizer.decode(window) for window in training.tokens_WS}
    assert len(held_out) > 0 and not seen & {tokenizer.decode(window) for window in held_out.tokens_WS}
    assert int(training.positions_WS.max()) < 16  # also of what goes on in a further window
    long = (text.Document("all that there is " * count) for count in range(999, 1200))
    for one in (
        [*many[:2], next(each for each in long if each.held_out)],  # more than the others together
        [next(each for each in many if each.held_out)],
        [next(each for each in many if not each.held_out)],
    ):
        whole = text.Windows(one, tokenizer, 16)
        training, held_out = text.split(one, tokenizer, 16, 1)
        assert torch.equal(torch.cat([training.tokens_WS, held_out.tokens_WS]), whole.tokens_WS)
    with pytest.raises(UsageError, match=f"{len(training)} windows of --seq 16 .* a step takes 99"):
        text.split(one, tokenizer, 16, 99)
