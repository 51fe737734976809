"""A sample that cannot be prepared stops the run or is left out, wherever it is prepared, and is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_servers import BATCH_SIZE, BatchSequence, batches, data_config, serving, training, with_servers
from PIL import Image
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from motet.config import RunConfig
from motet.data.chat import word_level_tokenizer
from motet.errors import UserError

NUM_RECORDS = 21
CUT_SHORT, NO_IMAGE = 4, 11
"""Records whose image's header is well, or is none."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("conversations")
    rng = np.random.default_rng(0)
    lines = []
    for i in range(NUM_RECORDS):
        Image.fromarray(rng.integers(0, 256, (60, 50, 3), dtype=np.uint8)).save(folder / f"{i}.png")
        turns = [{"from": "human", "value": f"<image> {i}?"}, {"from": "gpt", "value": "A cat."}]
        lines.append(json.dumps({"id": f"number {i}", "image": f"{i}.png", "conversations": turns}))
    whole = (folder / f"{CUT_SHORT}.png").read_bytes()
    (folder / f"{CUT_SHORT}.png").write_bytes(whole[: len(whole) // 2])
    (folder / f"{NO_IMAGE}.png").write_bytes(b"no image")
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    word_level_tokenizer(["A cat."]).save_pretrained(folder / "tokenizer")
    SiglipImageProcessorPil(size={"height": 48, "width": 48}).save_pretrained(folder / "vision")
    return folder


def config(folder: Path, on_corrupt: str, **changed: Any) -> RunConfig:
    data = {
        "kind": "conversations",
        "files": str(folder / "train.jsonl"),
        "image_folder": str(folder),
        "tokenizer": str(folder / "tokenizer"),
        "processors": {"vision": str(folder / "vision")},
        "on_corrupt": on_corrupt,
    }
    return data_config(**{**data, **changed})


@pytest.mark.parametrize("workers", [0, 1])
def test_stop(folder: Path, workers: int) -> None:
    with pytest.raises(UserError, match=rf"\b({CUT_SHORT}.png: cannot be decoded|{NO_IMAGE}.png: is no image)"):
        batches(config(folder, "stop", workers=workers), 2)


def test_stop_by_servers(folder: Path) -> None:
    run = config(folder, "stop", workers=1)
    with (
        serving(run) as (server,),
        training(with_servers(run, server.address)) as client,
        pytest.raises(UserError, match=rf"\b({CUT_SHORT}.png: cannot be decoded|{NO_IMAGE}.png: is no image)"),
    ):
        client.next(2)


def test_skip_is_the_same_wherever_it_is_decided(folder: Path) -> None:
    seen, skipped = [], []
    for workers, num_servers in ((0, 0), (2, 0), (0, 1), (1, 2)):
        run = config(folder, "skip", workers=workers)
        with serving(run, num_servers) as servers:
            asked = with_servers(run, *(server.address for server in servers))
            with training(asked) as client:
                seen.append(client.next(2))
                skipped.append(client.report()["skipped"])
    assert all(other == seen[0] for other in seen)
    assert all(other == skipped[0] for other in skipped)
    assert 1 <= len(skipped[0]) <= 2
    assert all(f"{CUT_SHORT}.png: cannot" in told or f"{NO_IMAGE}.png: is no" in told for told in skipped[0])


def test_ranks_that_need_no_pixels_skip_alike(folder: Path) -> None:
    run = config(folder, "skip", workers=0)
    names = {}
    for module in ("language_model", "vision"):
        sequence = BatchSequence(run, modules=(module,))
        names[module] = [[sample.id for sample in next(sequence.loader).samples] for _ in range(4)]
        sequence.close()
    assert names["language_model"] == names["vision"]
    told = {name for batch in names["vision"] for name in batch}
    assert not {f"number {CUT_SHORT}", f"number {NO_IMAGE}"} & told
    assert any(len(batch) < BATCH_SIZE for batch in names["vision"])


def test_a_batch_of_nothing_but_corrupt_samples_ends_the_run(tmp_path: Path, folder: Path) -> None:
    bad = json.loads((folder / "train.jsonl").read_text().splitlines()[NO_IMAGE])
    (tmp_path / "bad.jsonl").write_text("\n".join(json.dumps({**bad, "id": i}) for i in range(BATCH_SIZE)))
    run = config(folder, "skip", workers=0, files=str(tmp_path / "bad.jsonl"))
    with pytest.raises(
        UserError, match=r"data.on_corrupt: no sample of a whole batch can be prepared; .*11.png: is no"
    ):
        batches(run, 1)
