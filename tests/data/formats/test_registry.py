"""WebDataset shards and Parquet files hold the same conversations as JSON lines with files beside them."""

import io
import json
import multiprocessing
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conversation_files import CONVERSATIONS, write_conversations, write_media

from motet.data.example import PLACEHOLDERS, Example, ExampleSource
from motet.data.formats.registry import open_conversations
from motet.errors import UserError


def media_files(record: dict[str, Any], modality: str) -> list[str]:
    given = record.get(modality, [])
    return [given] if isinstance(given, str) else given


def write_shard(path: Path, folder: Path, records: list[dict[str, Any]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for record in records:
            members = [(f"{record['id']}.json", json.dumps({"conversations": record["conversations"]}).encode())]
            for modality in PLACEHOLDERS:
                for i, name in enumerate(media_files(record, modality)):
                    members.append((f"{record['id']}.{i}.{name.partition('.')[2]}", (folder / name).read_bytes()))
            for name, content in members:
                info = tarfile.TarInfo(f"data/{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def write_parquet(path: Path, folder: Path, records: list[dict[str, Any]], rows_per_group: int = 3) -> Path:
    def stored(record: dict[str, Any], modality: str) -> list[dict[str, Any]]:
        return [{"bytes": (folder / n).read_bytes(), "path": n} for n in media_files(record, modality)]

    rows = [
        {
            "id": record["id"],
            "conversations": record["conversations"],
            "image": stored(record, "image"),
            "audio": stored(record, "audio"),
        }
        for record in records
    ]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=rows_per_group)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_media(tmp_path)
    return tmp_path


def content_of(example: Example) -> list[Any]:
    media = [
        (modality, item.size(), np.asarray(item.load()).tobytes())
        for modality in PLACEHOLDERS
        for item in example.media[modality]
    ]
    return [example.messages, *media]


def contents(source: ExampleSource) -> list[list[Any]]:
    return [content_of(source[i]) for i in range(len(source))]


def test_all_kinds_hold_the_same(folder: Path) -> None:
    folders = {"image": folder, "audio": folder}
    records = list(CONVERSATIONS)
    lines = open_conversations([str(write_conversations(folder / "a.jsonl"))], folders)
    shard = open_conversations([str(write_shard(folder / "a.tar", folder, records))], {})
    parquet = open_conversations([str(write_parquet(folder / "a.parquet", folder, records))], {})
    assert contents(shard) == contents(parquet) == contents(lines)
    assert [parquet[i].id for i in range(4)] == [lines[i].id for i in range(4)]
    assert [shard[i].id for i in range(4)] == [f"data/{lines[i].id}" for i in range(4)]


def test_several_files_in_order_and_by_pattern(folder: Path) -> None:
    records = list(CONVERSATIONS)
    for i in range(4):
        write_shard(folder / f"part-{i}.tar", folder, records[i : i + 1])
    write_parquet(folder / "rest.parquet", folder, records[:2])
    whole = contents(open_conversations([str(write_shard(folder / "whole.tar", folder, records))], {}))
    source = open_conversations([str(folder / "part-*.tar"), str(folder / "rest.parquet")], {})
    assert contents(source) == [*whole, *whole[:2]]


def test_forked_processes_read_by_themselves(folder: Path) -> None:
    records = [{**CONVERSATIONS[i % 4], "id": f"{i}-{CONVERSATIONS[i % 4]['id']}"} for i in range(40)]
    shard, parquet = folder / "a.tar", folder / "a.parquet"
    write_shard(shard, folder, records)
    write_parquet(parquet, folder, records)
    source = open_conversations([str(shard), str(parquet)], {})
    expected = contents(source)

    def work(order: list[int], sender: Any) -> None:
        sender.send(all(content_of(source[i]) == expected[i] for i in order))

    context = multiprocessing.get_context("fork")
    receivers = []
    for seed in range(3):
        receiver, sender = context.Pipe(duplex=False)
        order = np.random.default_rng(seed).permutation(len(source)).tolist()
        context.Process(target=work, args=(order, sender), daemon=True).start()
        receivers.append(receiver)
    assert all(receiver.poll(60) and receiver.recv() for receiver in receivers)


def test_the_fingerprint_tells_files_apart(folder: Path) -> None:
    records = list(CONVERSATIONS)
    for write, suffix in ((write_shard, "tar"), (write_parquet, "parquet")):
        same = [open_conversations([str(write(folder / f"{i}.{suffix}", folder, records))], {}) for i in range(2)]
        fewer = open_conversations([str(write(folder / f"3.{suffix}", folder, records[:3]))], {})
        assert same[0].fingerprint == same[1].fingerprint != fewer.fingerprint


def expect(told: str, file: Path, index: int | None = None) -> None:
    if index is None:
        with pytest.raises(UserError, match=told):
            open_conversations([str(file)], {})
    else:
        source = open_conversations([str(file)], {})
        with pytest.raises(UserError, match=told):
            source[index]


def test_shards_that_are_wrong(folder: Path) -> None:
    records = list(CONVERSATIONS)
    told = "z.tar: cannot be read as a tar file .*; give a WebDataset shard that is not compressed"
    expect(told, write_shard(folder / "z.tar", folder, records, "w:gz"))
    (folder / "text.tar").write_text("no shard")
    expect("text.tar: cannot be read as a tar file", folder / "text.tar")
    expect(r"gone.tar: cannot be read as a tar file .*No such file", folder / "gone.tar")
    expect(r"nothing-\*.tar: no file matches this pattern", folder / "nothing-*.tar")
    expect("empty.tar: no conversation in it", write_shard(folder / "empty.tar", folder, []))
    broken = {**records[0], "conversations": records[2]["conversations"]}
    told = "broken.tar: data/one-image: image: names 1 files, but the turns hold 0 <image>"
    expect(told, write_shard(folder / "broken.tar", folder, [records[2], broken]), 1)
    with tarfile.open(folder / "bare.tar", "w") as tar:
        tar.add(folder / "wide.png", "7.png")
    expect("bare.tar: 7: has 0 members 7.json; give one with the conversation", folder / "bare.tar", 0)


def test_parquet_files_that_are_wrong(folder: Path) -> None:
    (folder / "text.parquet").write_text("no parquet")
    expect("text.parquet: cannot be read as Parquet", folder / "text.parquet")
    pq.write_table(pa.table({"text": ["a"]}), folder / "other.parquet")
    expect("other.parquet: has no column conversations or messages; it has text", folder / "other.parquet")
    damaged = write_parquet(folder / "damaged.parquet", folder, list(CONVERSATIONS), rows_per_group=1)
    first = pq.ParquetFile(damaged).metadata.row_group(0).column(0).data_page_offset
    content = damaged.read_bytes()
    damaged.write_bytes(content[:first] + bytes(20) + content[first + 20 :])
    expect("damaged.parquet: row 0: cannot be read .*; replace the file", damaged, 0)
    assert open_conversations([str(damaged)], {})[1].id == CONVERSATIONS[1]["id"]
    turns = [[{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "A cat."}]]
    pq.write_table(pa.table({"conversations": turns, "image": ["cat.jpg"]}), folder / "paths.parquet")
    expect("paths.parquet: row 0: image: cat.jpg: there is no such file", folder / "paths.parquet", 0)


def test_media_that_no_module_takes_and_keys_that_are_not_read(folder: Path) -> None:
    records = [{**CONVERSATIONS[0], "id": "a"}]
    shard = open_conversations([str(write_shard(folder / "a.tar", folder, records))], {}, ("audio",))
    with pytest.raises(UserError, match=r"a\.tar: data/a: image: no module of the model takes it"):
        shard[0]
    parquet = open_conversations([str(write_parquet(folder / "a.parquet", folder, records))], {}, ("audio",))
    with pytest.raises(UserError, match=r"a\.parquet: row 0: image: no module of the model takes it"):
        parquet[0]
    rows = [{"conversations": CONVERSATIONS[2]["conversations"], "source": "web", "score": 1}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "b.parquet")
    (note,) = open_conversations([str(folder / "b.parquet")], {}).notes
    assert note.endswith("b.parquet: keys that are not read: source, score (first at its header)")
    with tarfile.open(folder / "b.tar", "w") as tar:
        for name, content in (("7.json", json.dumps({**CONVERSATIONS[2], "tag": 1})), ("7.txt", "?"), ("8.cls", "?")):
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content.encode()))
    (note,) = open_conversations([str(folder / "b.tar")], {}).notes
    assert note.endswith("b.tar: keys that are not read: *.txt, tag (first at " + str(folder / "b.tar") + ": 7)")
