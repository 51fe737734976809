"""The forms of records: which media stand where in which text, and what is said about the rest."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conversation_files import write_media

from motet.data.example import PLACEHOLDERS, Example
from motet.data.formats.records import RecordReader
from motet.errors import UserError

ANSWER = {"from": "gpt", "value": "That."}
SAID = {"role": "assistant", "content": "That."}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_media(tmp_path)
    (tmp_path / "clip.mp4").write_bytes(b"opened when it is needed")
    return tmp_path


def reader(folder: Path, modalities: Sequence[str] = ("image", "audio", "video")) -> RecordReader:
    return RecordReader(Path("data.jsonl"), dict.fromkeys(PLACEHOLDERS, folder), modalities)


def read(folder: Path, record: dict[str, Any], modalities: Sequence[str] = ("image", "audio", "video")) -> Example:
    return reader(folder, modalities).example(record, "data.jsonl:7")


def order(example: Example) -> list[str]:
    """The names of the files, in the order of the text."""
    return [Path(str(media.path)).name for _, media in example.items(tuple(PLACEHOLDERS))]  # type: ignore[attr-defined]


INTERLEAVED = "<image> and <video>, then <image>?"
FORMS: dict[str, dict[str, Any]] = {
    "llava": {
        "image": ["wide.png", "tall.jpg"],
        "video": "clip.mp4",
        "conversations": [
            {"from": "system", "value": "Be brief."},
            {"from": "human", "value": INTERLEAVED},
            ANSWER,
        ],
    },
    "sharegpt": {
        "images": ["wide.png", "tall.jpg"],
        "videos": ["clip.mp4"],
        "system": "Be brief.",
        "conversations": [{"from": "human", "value": INTERLEAVED}, ANSWER],
    },
    "messages with lists": {
        "images": ["wide.png", "tall.jpg"],
        "videos": ["clip.mp4"],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": INTERLEAVED},
            SAID,
        ],
    },
    "messages of parts": {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": "wide.png", "text": None},
                    {"type": "text", "text": " and "},
                    {"type": "video", "path": "clip.mp4"},
                    {"type": "text", "text": ", then "},
                    {"type": "image_url", "image_url": {"url": "tall.jpg"}},
                    {"type": "text", "text": "?"},
                ],
            },
            {"role": "assistant", "content": [{"type": "text", "text": "That."}]},
        ]
    },
    "parts without files": {
        "images": ["wide.png", "tall.jpg"],
        "video": "clip.mp4",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "image"}, " and ", {"type": "video"}, ", then ", {"type": "image"}, "?"],
            },
            SAID,
        ],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_say_the_same(folder: Path, form: str) -> None:
    example = read(folder, FORMS[form])
    assert [(m.role, m.content) for m in example.messages] == [
        ("system", "Be brief."),
        ("user", INTERLEAVED),
        ("assistant", "That."),
    ]
    assert order(example) == ["wide.png", "clip.mp4", "tall.jpg"]


def test_llava_video_marks_videos_as_images(folder: Path) -> None:
    record = {"video": "clip.mp4", "conversations": [{"from": "human", "value": "<image>\nWhat?"}, ANSWER]}
    example = read(folder, record)
    assert example.messages[0].content == "<video>\nWhat?"
    assert order(example) == ["clip.mp4"]


def test_files_inside_the_record(folder: Path) -> None:
    content = (folder / "wide.png").read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "image", "image": {"bytes": content}}]
    example = read(folder, {"messages": [{"role": "user", "content": parts}, SAID]})
    assert [media.size() for media in example.media["image"]] == [(40, 90), (40, 90)]


def test_text_about_html_is_no_video_where_no_module_takes_videos(folder: Path) -> None:
    record = {"conversations": [{"from": "human", "value": "How do I embed <video>?"}, ANSWER]}
    assert not read(folder, record, ("audio",)).media["video"]
    with pytest.raises(UserError, match=r"video: names 0 files, but the turns hold 1 <video>"):
        read(folder, record)


def test_keys_that_are_not_read_are_told_once(folder: Path) -> None:
    own = reader(folder)
    turns = [{"from": "human", "value": "?", "weight": 0}, ANSWER]
    for line in (1, 2, 3):
        extra = {} if line == 1 else {"source": "web", "score": None}
        own.example({"id": 1, "conversations": turns, **extra}, f"data.jsonl:{line}")
    own.example(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "?", "n": 1}]}, SAID]}, "data.jsonl:4"
    )
    assert own.notes == (
        "data.jsonl: keys that are not read: conversations[].weight, source, content[].n (first at data.jsonl:1)",
    )
    assert reader(folder).notes == ()


def asks(content: Any, **record: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}, SAID], **record}


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no module for videos": (
        {"video": "clip.mp4", "conversations": [{"from": "human", "value": "What?"}, ANSWER]},
        "video: no module of the model takes it; add one that does, or leave the key out",
    ),
    "no module for a part": (
        asks([{"type": "video", "video": "clip.mp4"}]),
        r"messages\[0\].content\[0\]: no module of the model takes video",
    ),
    "two lists": (asks("<image>", image="wide.png", images=["wide.png"]), "images: image is given, too"),
    "two conversations": (asks("?", conversations=[ANSWER]), "messages: conversations are given, too"),
    "more files than parts": (asks("?", images=["wide.png"]), "images: names 1 files, but the turns hold 0 <image>"),
    "missing file in a part": (
        asks([{"type": "image", "image": "none.png"}]),
        r"messages\[0\].content\[0\].image: .*none\.png: there is no such file",
    ),
    "second of a list missing": (asks("<image><image>", images=["wide.png", "none.png"]), r"images\[1\]: .*none\.png"),
    "url": (asks([{"type": "image", "url": "https://a.b/c.png"}]), "url: https://a.b/c.png: nothing is downloaded"),
    "not base64": (asks([{"type": "image", "url": "data:image/png;base64,???"}]), "is not base64"),
    "unknown part": (asks([{"type": "tool"}]), r"messages\[0\].content\[0\].type: is 'tool'; give one of text, image"),
    "no text": (asks(None), r"messages\[0\].content: is None; give a text"),
    "tool turn": (
        {"messages": [{"role": "tool", "content": "?"}, SAID]},
        r"messages\[0\].role: is 'tool'; give one of human, user",
    ),
    "two questions": (
        {"messages": [{"role": "user", "content": "?"}, {"role": "user", "content": "?"}, SAID]},
        "messages: turn 1 must be from assistant",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_told_with_file_line_and_key(folder: Path, name: str) -> None:
    record, message = BROKEN[name]
    with pytest.raises(UserError, match=rf"^data\.jsonl:7: {message}|^data\.jsonl:7: .*{message}") as caught:
        read(folder, record, ("image", "audio"))
    assert "\n" not in str(caught.value)
