"""What a data server sends that is none of ours is told in one line that names it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pytest
from data_servers import TOKEN
from pyarrow import flight

from motet.data.service.client import Connection, RemoteProducer, Servers
from motet.data.service.server import SCHEMA
from motet.errors import UserError

FACTS = {"data": {}, "contents": {"train": "x"}, "sizes": {"train": 4}, "software": {}}


class Impostor(flight.FlightServerBase):
    """Answers whatever it is asked with the same bytes."""

    def __init__(self, body: bytes, header: bytes, table: pa.RecordBatch) -> None:
        self.body, self.header, self.table = body, header, table
        super().__init__("grpc://127.0.0.1:0")

    def do_action(self, context: Any, action: Any) -> Iterator[bytes]:
        yield self.body

    def do_get(self, context: Any, ticket: Any) -> flight.GeneratorStream:
        return flight.GeneratorStream(self.table.schema, iter([(self.table, pa.py_buffer(self.header))]))


@contextmanager
def connected(body: bytes = b"", header: bytes = b"{}", table: pa.RecordBatch | None = None) -> Iterator[Connection]:
    empty = pa.record_batch([pa.array([b"no metadata"], pa.large_binary())], schema=SCHEMA)
    with Impostor(body, header, table or empty) as server:
        connection = Connection(f"grpc://127.0.0.1:{server.port}", TOKEN, 60, None)
        try:
            yield connection
        finally:
            connection.close()


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\x00",
        b"[]",
        b"{}",
        b"[" * 50_000,
        json.dumps({**FACTS, "sizes": {"train": "many"}}).encode(),
        json.dumps({**FACTS, "contents": {}}).encode(),
        json.dumps({**FACTS, "software": None}).encode(),
    ],
)
def test_facts(body: bytes) -> None:
    told = r"data.servers: grpc://127.0.0.1:\d+ sent what cannot be read \(.*; start motet serve-data"
    with connected(body) as connection, pytest.raises(UserError, match=told) as refused:
        connection.describe()
    assert "\n" not in str(refused.value)
    with connected(json.dumps(FACTS).encode()) as connection:
        assert connection.describe() == FACTS


NUMBERS = pa.record_batch([pa.array([1])], names=["data"])


@pytest.mark.parametrize(
    ("header", "table"),
    [
        (b"\xff", None),
        (b"7", None),
        (b"{}", None),
        (b'{"tensors": 7}', None),
        (b'{"tensors": [{"x": ["float32", [1000], 0]}]}', None),
        (b'{"tensors": [{"x": ["float32", [-1], 0]}]}', None),
        (b"{}", NUMBERS),
        (b"{}", pa.record_batch([], names=[])),
    ],
)
@pytest.mark.parametrize("asks_metadata", [True, False])
def test_samples(header: bytes, table: pa.RecordBatch | None, asks_metadata: bool) -> None:
    told = r"data.servers: grpc://127.0.0.1:\d+ sent what cannot be read"
    with connected(header=header, table=table) as connection:
        producer = RemoteProducer(Servers([connection], "x", 60), "train", 4, "x", may_skip=False)
        with pytest.raises(UserError, match=told) as refused:
            producer.samples([0]) if asks_metadata else producer.features("vision", [0])
    assert "\n" not in str(refused.value)
