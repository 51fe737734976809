"""A server that dies, falls silent or comes back changes nothing; strangers and other data are refused in one line."""

import json
import os
import select
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from data_servers import (
    OTHER_TOKEN,
    TOKEN,
    ClientProcess,
    ServerProcess,
    batches,
    data_config,
    serving,
    training,
    with_servers,
)
from distributed import run_distributed
from pyarrow import flight
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from waiting import wait_until

from motet.config import RunConfig
from motet.data.chat import word_level_tokenizer
from motet.data.service.tickets import Ticket
from motet.data.service.workers import Answer, Preparer, Workers
from motet.errors import UserError

NUM_BATCHES = 9


@pytest.fixture(scope="module")
def undisturbed() -> list[str]:
    return batches(data_config(workers=0, batches_ahead=0), NUM_BATCHES)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_dead_server_is_replaced(undisturbed: list[str], victim: int) -> None:
    config = data_config(workers=0)
    with serving(config, 2) as servers, training(with_servers(config, *(s.address for s in servers))) as client:
        seen = client.next(3)
        servers[victim].kill()
        assert seen + client.next(NUM_BATCHES - 3) == undisturbed
        assert client.report()["failures"] > 0


def test_a_server_that_comes_back_is_used_again(undisturbed: list[str]) -> None:
    """Only one is left at the end: the one that had gone."""
    config = data_config(workers=0)
    with serving(config, 2) as (first, second), training(with_servers(config, first.address, second.address)) as client:
        seen = client.next(2)
        first.kill()
        seen += client.next(2)
        again = ServerProcess(config, port=first.port)
        second.kill()
        assert seen + client.next(NUM_BATCHES - 4) == undisturbed
        again.kill()


def test_all_servers_gone_for_a_while(undisturbed: list[str]) -> None:
    config = data_config(workers=0)
    with serving(config) as (server,), training(with_servers(config, server.address)) as client:
        seen = client.next(2)
        server.kill()
        client.ask()
        again = ServerProcess(config, port=server.port)
        seen.append(client.answer())
        assert seen + client.next(NUM_BATCHES - 3) == undisturbed
        again.kill()


def test_a_silent_server_is_replaced(undisturbed: list[str]) -> None:
    config = data_config(workers=0)
    with serving(config, 2) as servers:
        addresses = [server.address for server in servers]
        with training(with_servers(config, *addresses, server_timeout_s=2.0)) as client:
            seen = client.next(3)
            assert servers[0].process.pid is not None
            os.kill(servers[0].process.pid, signal.SIGSTOP)
            assert seen + client.next(NUM_BATCHES - 3) == undisturbed


def test_when_no_server_answers_any_more_the_run_ends() -> None:
    config = data_config(workers=0)
    with serving(config) as (server,):
        client = ClientProcess(with_servers(config, server.address, server.address, server_timeout_s=1.0))
        client.next(1)
        server.kill()
        with pytest.raises(RuntimeError, match=r"data.servers: none has answered for 1 s; .*127.0.0.1"):
            client.next(5)
        client.kill()


def test_a_worker_of_a_server_that_dies_is_replaced(undisturbed: list[str]) -> None:
    config = data_config(workers=2)
    with serving(config) as (server,), training(with_servers(config, server.address)) as client:
        seen = client.next(3)
        before = server.workers()
        assert len(before) == 2
        os.kill(before[0], signal.SIGKILL)
        assert seen + client.next(NUM_BATCHES - 3) == undisturbed
        # One of the two may have done it all before the loss of the other was noticed.
        wait_until(lambda: not set(before) & set(server.workers()))
        assert client.report()["failures"] == 0


def test_a_worker_of_the_training_process_that_dies_is_replaced(undisturbed: list[str]) -> None:
    with training(data_config(workers=1)) as client:
        seen = client.next(3)
        (worker,) = client.children()
        os.kill(worker, signal.SIGKILL)
        assert seen + client.next(NUM_BATCHES - 3) == undisturbed
        assert client.report()["failures"] == 1


def test_workers_end_with_who_had_them() -> None:
    config = data_config(workers=2)
    with serving(config) as (server,):
        workers = server.workers()
    with training(config) as client:
        client.next(1)
        workers += client.children()
    assert len(workers) == 4
    for worker in workers:
        wait_until_gone(worker)


def wait_until_gone(pid: int) -> None:
    process = os.pidfd_open(pid) if os.path.exists(f"/proc/{pid}") else None
    if process is not None:
        assert select.select([process], [], [], 60)[0], f"process {pid} lives on"
        os.close(process)


def test_a_ticket_of_which_workers_die_again_and_again_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(self: Preparer, ticket: Ticket, *allocate: object) -> object:
        if ticket.module is not None:
            os._exit(1)
        return original(self, ticket)

    original = Preparer.answer
    monkeypatch.setattr(Preparer, "answer", answer)
    told = r"worker processes died 5 times over train samples .*; is one of them"
    with training(data_config(workers=1)) as client, pytest.raises(RuntimeError, match=told):
        client.next(1)


def test_what_fails_in_a_server_is_told_and_not_tried_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(self: Preparer, ticket: Ticket, *allocate: object) -> object:
        raise ZeroDivisionError("a mistake of ours")

    config = data_config(workers=1)
    with monkeypatch.context() as patched:
        patched.setattr(Preparer, "answer", answer)
        server = ServerProcess(config)
    told = f"{server.address} refuses: .*ZeroDivisionError: a mistake of ours"
    with (
        training(with_servers(config, server.address)) as client,
        pytest.raises(RuntimeError, match=told),
    ):
        client.next(1)
    server.kill()


@pytest.mark.parametrize(
    ("leaves_out", "told"), [(True, "has left samples out"), (False, "has sent samples that were not requested")]
)
def test_too_few_or_too_many_samples_end_the_run(monkeypatch: pytest.MonkeyPatch, leaves_out: bool, told: str) -> None:
    """They are not taken for those that were asked for."""

    def answers(self: Workers, tickets: Iterable[Ticket]) -> Iterator[Answer]:
        given = list(original(self, tickets))
        yield from given[1:] if leaves_out else [*given, *given]

    original, config = Workers.answers, data_config(workers=0)
    with monkeypatch.context() as patched:
        patched.setattr(Workers, "answers", answers)
        server = ServerProcess(config)
    with training(with_servers(config, server.address)) as client, pytest.raises(RuntimeError, match=told):
        client.next(1)
    server.kill()


# Who may ask, and for what.


@pytest.mark.parametrize("token", [OTHER_TOKEN, TOKEN[:-1] + "N", TOKEN + "x"])
def test_a_stranger_is_refused(token: str) -> None:
    config = data_config(workers=0)
    told = "refuses the token; give servers and training the same one"
    with (
        serving(config) as (server,),
        training(with_servers(config, server.address), token=token) as client,
        pytest.raises(UserError, match=f"{server.address} {told}"),
    ):
        client.next(1)


def ask_everything(address: str) -> dict[str, str]:
    """By method of Flight, what a client without token gets: what its error says."""
    client = flight.FlightClient(address)
    anything = flight.FlightDescriptor.for_path("x")
    calls = {
        "handshake": lambda: client.authenticate_basic_token("user", "password"),
        "list_flights": lambda: list(client.list_flights()),
        "get_flight_info": lambda: client.get_flight_info(anything),
        "get_schema": lambda: client.get_schema(anything),
        "list_actions": lambda: list(client.list_actions()),
        "do_action": lambda: list(client.do_action(flight.Action("describe", b""))),
        "do_get": lambda: client.do_get(flight.Ticket(b"{}")).read_all(),
        "do_put": lambda: client.do_put(anything, pa.schema([]))[0].close(),
        "do_exchange": lambda: client.do_exchange(anything)[1].read_all(),
    }
    got = {}
    for name, call in calls.items():
        try:
            got[name] = repr(call())
        except Exception as error:
            got[name] = str(error)
    return got


def test_whatever_a_stranger_asks_it_gets_nothing() -> None:
    with serving(data_config(workers=0)) as (server,):
        got = run_distributed(lambda rank: ask_everything(server.address), 1)[0]
    assert all("the token is missing or wrong" in told for told in got.values()), got


def ask_for_nonsense(address: str) -> dict[str, str]:
    """By what a client with the token asks for: what its error says."""
    agreed = '{"agreed": "x", "ticket": %s}'
    asked = {
        "no JSON": b"\xff",
        "nested": b"[" * 100_000,
        "a list": b"[]",
        "no ticket": b"{}",
        "a nested ticket": (agreed % json.dumps("[" * 100_000)).encode(),
        "an index before the first": (
            agreed % json.dumps('{"split": "train", "indices": [-1], "module": null}')
        ).encode(),
        "no indices": (agreed % json.dumps('{"split": "train", "indices": "all", "module": null}')).encode(),
        "other data": (agreed % json.dumps('{"split": "train", "indices": [0], "module": null}')).encode(),
    }
    client = flight.FlightClient(address)
    options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
    got = {}
    for name, ticket in asked.items():
        try:
            got[name] = repr(client.do_get(flight.Ticket(ticket), options).read_all())
        except flight.FlightServerError as error:
            got[name] = str(error)
    return got


def test_nonsense_from_who_has_the_token_ends_nothing() -> None:
    config = data_config(workers=0)
    with serving(config) as (server,), training(with_servers(config, server.address)) as client:
        client.next(1)
        told = run_distributed(lambda rank: ask_for_nonsense(server.address), 1)[0]
        client.next(1)
    assert "different data" in told["other data"]
    assert all(text and "pyarrow.Table" not in text for text in told.values()), told


def other(**changed: object) -> RunConfig:
    return data_config(workers=0, server_timeout_s=2.0, **changed)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"num_train": 45}, "num_train is 45 there, 44 here"),
        ({"max_digits": 2}, "max_digits is 2 there, 8 here"),
    ],
)
def test_a_server_of_other_data_is_refused(changed: dict[str, object], told: str) -> None:
    with (
        serving(other(**changed)) as (server,),
        training(with_servers(other(), server.address)) as client,
        pytest.raises(UserError, match=f"{server.address} prepares different data from this run file: data.{told}"),
    ):
        client.next(1)


def test_servers_that_come_back_with_other_data_are_refused() -> None:
    with serving(other()) as (server,), training(with_servers(other(batches_ahead=0), server.address)) as client:
        client.next(1)
        server.kill()
        again = ServerProcess(other(num_train=45), port=server.port)
        with pytest.raises(RuntimeError, match="this server has different data from the one that training began with"):
            client.next(1)
        again.kill()


def test_servers_with_another_tokenizer_in_the_same_place(tmp_path: Path) -> None:
    """Or other processors: they are no part of the run file, and training does not have them."""
    turns = [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "It is."}]
    (tmp_path / "train.jsonl").write_text("\n".join([json.dumps({"conversations": turns})] * 8))
    word_level_tokenizer(["It is."]).save_pretrained(tmp_path / "tokenizer")
    SiglipImageProcessorPil(size={"height": 48, "width": 48}).save_pretrained(tmp_path / "vision")
    config = data_config(
        kind="conversations",
        files=str(tmp_path / "train.jsonl"),
        tokenizer=str(tmp_path / "tokenizer"),
        processors={"vision": str(tmp_path / "vision")},
        workers=0,
    )
    with serving(config) as (first,):
        word_level_tokenizer(["Is it?"]).save_pretrained(tmp_path / "tokenizer")
        told = f"prepares different data from {first.address}: contents.train is .*language_model"
        with (
            serving(config) as (second,),
            training(with_servers(config, first.address, second.address)) as client,
            pytest.raises(UserError, match=told),
        ):
            client.next(1)


def test_seeds_layouts_and_batch_sizes_are_no_business_of_servers(undisturbed: list[str]) -> None:
    config = data_config(workers=0)
    train = config.train.model_copy(update={"seed": 9, "global_batch_size": 2, "steps": 77})
    served = config.model_copy(update={"train": train})
    with serving(served) as (server,), training(with_servers(config, server.address)) as client:
        assert client.next(2) == undisturbed[:2]
