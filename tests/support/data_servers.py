"""Data servers and their clients as forked processes: gRPC must not have begun in a process that forks."""

import hashlib
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from ports import port_of_its_own

from motet.assignment.sample import Sample
from motet.config import DescribedConfig, RunConfig
from motet.data.loader import LoadedBatch, Loader
from motet.data.service.opening import open_producers, open_server
from motet.data.service.tickets import TOKEN_VARIABLE
from motet.errors import UserError

TOKEN = "an-old-and-secret-token"
OTHER_TOKEN = "another-secret-token"
STARTS_WITHIN_S = 120
BATCH_SIZE = 8
MODULES = ("vision", "language_model")

VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 48,
    "patch_size": 16,
}
LANGUAGE_MODEL = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def data_config(**data: Any) -> RunConfig:
    """A vision and a language model on the task *dial a digit*, or on other `data`."""
    given = {"kind": "dial-a-digit", "num_train": 44, "num_held_out": 6, "no_sound": 1.0, "no_image": 0.0}
    values = {
        "model": {
            "encoders": {"vision": {"config": "SiglipVisionConfig", "values": VISION}},
            "language_model": {"config": "LlamaConfig", "values": LANGUAGE_MODEL},
        },
        "data": data if "kind" in data else {**given, "server_timeout_s": 30.0, **data},
        "train": {"global_batch_size": 8},
    }
    return RunConfig.model_validate(values)


def with_servers(config: RunConfig, *addresses: str, **changed: Any) -> RunConfig:
    return config.model_copy(update={"data": config.data.model_copy(update={"servers": addresses, **changed})})


def children_of(process: Any) -> list[int]:
    """Of all its threads."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


class ServerProcess:
    """Begins at once. `port`: where it was before; None: it is new."""

    def __init__(
        self, config: RunConfig, *, port: int | None = None, token: str = TOKEN, tls: tuple[bytes, bytes] | None = None
    ) -> None:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_serve, args=(config, port or port_of_its_own(), token, tls, sender))
        self.process.start()
        sender.close()
        if not receiver.poll(STARTS_WITHIN_S):
            raise TimeoutError("the data server did not start")
        self.address: str = receiver.recv()

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def workers(self) -> list[int]:
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def kill(self) -> None:
        """As kill -9 does."""
        self.process.kill()
        self.process.join()


def _serve(config: RunConfig, port: int, token: str, tls: tuple[bytes, bytes] | None, sender: Any) -> None:
    os.environ[TOKEN_VARIABLE] = token
    torch.set_num_threads(1)  # A pool of threads does not survive the fork: two threads might mend it at once.
    server = open_server(config, host="127.0.0.1", port=port, tls=tls)
    sender.send(server.address)
    server.serve_until_signalled()


@contextmanager
def serving(config: RunConfig, number: int = 1, **options: Any) -> Iterator[list[ServerProcess]]:
    servers: list[ServerProcess] = []
    try:
        for _ in range(number):
            servers.append(ServerProcess(config, **options))
        yield servers
    finally:
        for server in servers:
            server.kill()


class ClientProcess:
    """A training process that takes a batch when it is told to: whoever tells decides what happens in between.

    It sees what a rank with `modules` sees. `begin`: number of batches before its first one."""

    def __init__(
        self, config: RunConfig, *, begin: int = 0, token: str = TOKEN, modules: tuple[str, ...] = MODULES
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe()
        self.process = context.Process(target=_take_batches, args=(config, begin, token, modules, theirs))
        self.process.start()
        theirs.close()

    def ask(self) -> None:
        """For the next batch, without waiting for it."""
        self._ours.send("next")

    def answer(self) -> str:
        """The digest of the batch. Raises what the client raised: `UserError` or another, in words."""
        return self._receive()

    def next(self, number: int) -> list[str]:
        digests = []
        for _ in range(number):
            self.ask()
            digests.append(self.answer())
        return digests

    def children(self) -> list[int]:
        return children_of(self.process)

    def report(self) -> dict[str, Any]:
        self._ours.send("report")
        return self._receive()

    def _receive(self) -> Any:
        if not self._ours.poll(STARTS_WITHIN_S):
            raise TimeoutError("the client does not answer")
        kind, result = self._ours.recv()
        if kind != "result":
            raise {"UserError": UserError}.get(kind, RuntimeError)(result)
        return result

    def kill(self) -> None:
        """As kill -9 does."""
        self.process.kill()
        self.process.join()


def _take_batches(config: RunConfig, begin: int, token: str, modules: tuple[str, ...], connection: Any) -> None:
    os.environ[TOKEN_VARIABLE] = token
    taking: BatchSequence | None = None
    while True:
        try:
            told = connection.recv()
        except EOFError:
            break
        try:
            taking = taking or BatchSequence(config, begin=begin, modules=modules)
            connection.send(("result", next(taking) if told == "next" else taking.report()))
        except Exception as error:
            connection.send((type(error).__name__, str(error)))
    os._exit(0)


@contextmanager
def training(config: RunConfig, **options: Any) -> Iterator[ClientProcess]:
    client = ClientProcess(config, **options)
    try:
        yield client
    finally:
        client.kill()


class BatchSequence:
    """The batches that a training process sees from the `begin`-th on, as digests."""

    def __init__(self, config: RunConfig, *, begin: int = 0, modules: tuple[str, ...] = MODULES) -> None:
        self._modules = modules
        self._producers = open_producers(config)
        wanted = partial(all_of_each, modules)
        assert not isinstance(config.data, DescribedConfig)
        ahead = config.data.batches_ahead
        self.loader = Loader(self._producers.train, BATCH_SIZE, seed=3, wanted=wanted, batches_ahead=ahead)
        epoch, step = divmod(begin, self.loader.batches_per_epoch)
        self.loader.load_state({**self.loader.state(), "epoch": epoch, "step": step})
        self._skipped: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        batch = next(self.loader)
        self._skipped += batch.skipped
        return digest_of(batch, self._modules)

    def report(self) -> dict[str, Any]:
        received = dict(self._producers.train.received_bytes)
        return {"skipped": self._skipped, "received": received, "failures": self._producers.num_failures()}

    def close(self) -> None:
        self.loader.close()
        self._producers.close()


def batches(config: RunConfig, number: int, **options: Any) -> list[str]:
    """Of a training process that is this one."""
    sequence = BatchSequence(config, **options)
    try:
        return list(islice(sequence, number))
    finally:
        sequence.close()


def all_of_each(modules: tuple[str, ...], samples: tuple[Sample, ...]) -> dict[str, list[int]]:
    return {module: [place for place, sample in enumerate(samples) if sample.has(module)] for module in modules}


def digest_of(batch: LoadedBatch, modules: tuple[str, ...]) -> str:
    """Of all samples' metadata, and of their tensors for some modules."""
    digest = hashlib.sha256(repr(batch.samples).encode())
    for module, places in all_of_each(modules, batch.samples).items():
        for place in places:
            for name, tensor in sorted(batch.features(module, place).items()):
                digest.update(f"{module} {place} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
