"""Values that ranks tell each other: typed, validated, and never code."""

import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed

from motet.errors import UserError
from motet.runtime.communication import agreement
from motet.runtime.communication.agreement import gather_values, on_every_rank, on_first_rank


class Key(NamedTuple):
    name: str
    index: int


@dataclass(frozen=True)
class Value:
    shape: tuple[int, ...]
    best: float = math.inf
    path: Path | None = None
    by_step: dict[int, float] = field(default_factory=dict)


def test_values_come_back_as_they_were() -> None:
    def work(rank: int) -> None:
        mine = [(Key("weight", rank), Value((rank, 2), path=Path("/a"), by_step={3: 0.1 + rank}))] * rank
        first, second = gather_values(list[tuple[Key, Value]], mine)
        assert first == []
        assert second == [(Key("weight", 1), Value((1, 2), path=Path("/a"), by_step={3: 1.1}))]
        assert gather_values(None, None) == [None, None]
        assert math.isnan(gather_values(float, math.nan)[0])

    run_distributed(work, 2)


class Bomb:
    def __reduce__(self) -> Any:
        return print, ("boom",)


SENT = {
    "pickle": pickle.dumps(Bomb()),
    "another type": b'{"a": 1}',
    "no JSON": b"\xff\xff",
    "nested": b"[" * 100_000,
}


@pytest.mark.parametrize("sent", SENT.values(), ids=SENT)
def test_a_rank_that_sends_something_else_is_named(sent: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    def work(rank: int) -> str:
        if rank == 1:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(sizes, torch.tensor([len(sent)]))
            padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
            padded[: len(sent)] = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
            dist.all_gather([torch.empty_like(padded) for _ in range(2)], padded)
            return ""
        with pytest.raises(ValueError, match="rank 1 sent something that is not of the type") as refused:
            gather_values(list[int], [1])
        return str(refused.value)

    run_distributed(work, 2)
    assert "boom" not in capfd.readouterr().out


def test_a_rank_that_wants_to_send_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MAX_VALUE_BYTES", 100)

    def work(rank: int) -> None:
        with pytest.raises(ValueError, match=r"ranks want to send \[2, 1002\] bytes; at most 100"):
            gather_values(str, "x" * 1000 * rank)

    run_distributed(work, 2)


@pytest.mark.parametrize("error", [UserError("train.output: is wrong"), OSError(28, "No space left on device")])
def test_what_fails_on_one_rank_fails_on_all(error: Exception) -> None:
    def fail() -> int:
        if dist.get_rank() == 1:
            raise error
        return 0

    def work(rank: int) -> None:
        with pytest.raises(type(error)) as failed:
            on_every_rank(int, fail)
        assert str(failed.value) == str(error)
        assert on_first_rank(Path, lambda: Path(str(rank))) == Path("0")

    run_distributed(work, 2)
