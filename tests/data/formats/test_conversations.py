"""Reading the LLaVA form: what is read, and one clear line for whatever is wrong."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conversation_files import CONVERSATIONS, write_conversations, write_media

from motet.data.example import PLACEHOLDERS
from motet.data.formats.conversations import ConversationExamples
from motet.data.formats.records import RecordReader
from motet.data.formats.registry import open_conversations
from motet.errors import UserError

QUESTION = {"from": "human", "value": "What?"}
ANSWER = {"from": "gpt", "value": "That."}


def read(folder: Path, *records: Any, modalities: Sequence[str] = ("image", "audio")) -> ConversationExamples:
    file = write_conversations(folder / "data.jsonl", records)
    return ConversationExamples(RecordReader(file, dict.fromkeys(PLACEHOLDERS, folder), modalities))


def test_records_become_examples(tmp_path: Path) -> None:
    write_media(tmp_path)
    examples = read(tmp_path, *CONVERSATIONS)
    assert [examples[i].id for i in range(len(examples))] == ["one-image", "both", "text", "one-clip"]
    both = examples[1]
    assert [message.role for message in both.messages] == ["system", "user", "assistant"]
    assert [image.size() for image in both.media["image"]] == [(70, 30), (40, 90)]
    assert [clip.size() for clip in both.media["audio"]] == [(15_000, 16_000), (3_001, 8_000)]
    assert both.where.endswith("data.jsonl:2")
    assert not any(examples[2].media.values())


def test_a_json_list_and_several_files_are_read_alike(tmp_path: Path) -> None:
    write_media(tmp_path)
    (tmp_path / "list.json").write_text(json.dumps(CONVERSATIONS[:2], indent=1))
    lines = write_conversations(tmp_path / "lines.jsonl", CONVERSATIONS[2:])
    files = [str(tmp_path / "list.json"), str(lines)]
    examples = open_conversations(files, {"image": tmp_path, "audio": tmp_path})
    whole = read(tmp_path, *CONVERSATIONS)
    assert [examples[i].messages for i in range(4)] == [whole[i].messages for i in range(4)]


def test_a_record_without_id_is_named_by_its_place(tmp_path: Path) -> None:
    assert read(tmp_path, {"conversations": [QUESTION, ANSWER]})[0].id.endswith("data.jsonl:1")


BROKEN: dict[str, tuple[Any, str]] = {
    "no mapping": (["x"], "is not a mapping; give one with the keys id, conversations or messages, image, ..."),
    "no conversation": ({"id": "a"}, "conversations: is missing or empty"),
    "empty conversation": ({"conversations": []}, "conversations: is missing or empty"),
    "unknown role": (
        {"conversations": [{"from": "robot", "value": "x"}, ANSWER]},
        r"conversations\[0\].from: is 'robot'; give one of human",
    ),
    "no role": ({"conversations": [{"value": "x"}, ANSWER]}, r"conversations\[0\].from: is None"),
    "no text": ({"conversations": [QUESTION, {"from": "gpt"}]}, r"conversations\[1\].value: is None; give a text"),
    "answer missing": ({"conversations": [QUESTION]}, "conversations: has no answer at its end"),
    "question last": ({"conversations": [QUESTION, ANSWER, QUESTION]}, "conversations: has no answer at its end"),
    "answer empty": (
        {"conversations": [QUESTION, {"from": "gpt", "value": " "}]},
        r"conversations\[1\].value: is an empty answer",
    ),
    "answer first": ({"conversations": [ANSWER]}, "conversations: turn 0 must be from human"),
    "two questions": ({"conversations": [QUESTION, QUESTION, ANSWER]}, "conversations: turn 1 must be from gpt"),
    "late system turn": (
        {"conversations": [QUESTION, {"from": "system", "value": "x"}, ANSWER]},
        "conversations: has a system turn that is not the first",
    ),
    "image in answer": (
        {"image": "wide.png", "conversations": [QUESTION, {"from": "gpt", "value": "<image>"}]},
        r"conversations\[1\].value: an answer cannot hold images",
    ),
    "more placeholders than images": (
        {"image": "wide.png", "conversations": [{"from": "human", "value": "<image><image>"}, ANSWER]},
        "image: names 1 files, but the turns hold 2 <image>; give one placeholder for each file",
    ),
    "fewer placeholders than clips": (
        {"audio": ["long.wav"], "conversations": [QUESTION, ANSWER]},
        "audio: names 1 files, but the turns hold 0 <audio>",
    ),
    "missing image": (
        {"image": "none.png", "conversations": [{"from": "human", "value": "<image>"}, ANSWER]},
        r"image: .*none\.png: there is no such file",
    ),
    "path longer than any": (
        {"image": "a" * 5000, "conversations": [{"from": "human", "value": "<image>"}, ANSWER]},
        "image: .*: there is no such file",
    ),
    "half a character": (
        {"conversations": [{"from": "human", "value": "\ud83d?"}, ANSWER]},
        r"conversations\[0\].value: contains an unpaired surrogate",
    ),
    "image of another type": ({"image": 7, "conversations": [QUESTION, ANSWER]}, "image: is 7; give a path"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_told_with_file_and_line(tmp_path: Path, name: str) -> None:
    write_media(tmp_path)
    record, message = BROKEN[name]
    with pytest.raises(UserError, match=rf"data\.jsonl:2: {message}") as caught:
        read(tmp_path, {"conversations": [QUESTION, ANSWER]}, record)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    """Editors on Windows write one."""
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"conversations": [QUESTION, ANSWER]}), encoding="utf-8-sig")
    assert len(ConversationExamples(RecordReader(file, {}, ()))) == 1


def test_a_line_that_is_not_json(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps({"conversations": [QUESTION, ANSWER]}) + '\n\n{"id": \n')
    with pytest.raises(UserError, match=r"data\.jsonl:3: is not JSON"):
        ConversationExamples(RecordReader(file, {}, ()))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no conversation in it"),
        (b"[1,", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_is_no_conversations(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "data.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=rf"data\.json: {message}"):
        open_conversations([str(file)], {"image": tmp_path, "audio": tmp_path})
