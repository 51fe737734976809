"""Data servers and their clients as forked processes: gRPC must not have begun in a process that forks."""

import hashlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from distributed import run_distributed

from motet.config import RunConfig
from motet.data.loader import LoadedBatch, Loader
from motet.data.preprocessing.access import TOKEN_VARIABLE
from motet.data.preprocessing.opening import open_producers, open_server

TOKEN = "an-old-and-secret-token"
OTHER_TOKEN = "another-secret-token"
STARTS_WITHIN_S = 120

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


class ServerProcess:
    """Begins at once. `port`: 0 for any."""

    def __init__(self, config: RunConfig, *, port: int = 0, token: str = TOKEN, **options: Any) -> None:
        context = multiprocessing.get_context("fork")
        receiver, sender = context.Pipe(duplex=False)
        self.process = context.Process(target=_serve, args=(config, port, token, options, sender))
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
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


def _serve(config: RunConfig, port: int, token: str, options: dict[str, Any], sender: Any) -> None:
    os.environ[TOKEN_VARIABLE] = token
    server = open_server(config, host="127.0.0.1", port=port, tls=options.get("tls"))
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


def in_client(work: Callable[[], Any], *, token: str = TOKEN, timeout: float = 180.0) -> Any:
    """What `work` returns, in a process of its own."""

    def run(rank: int) -> Any:
        os.environ[TOKEN_VARIABLE] = token
        return work()

    return run_distributed(run, 1, timeout=timeout)[0]


def all_of_each(samples: tuple[Any, ...]) -> dict[str, list[int]]:
    return {
        module: [place for place, sample in enumerate(samples) if sample.has(module)]
        for module in ("vision", "language_model")
    }


def digest_of(batch: LoadedBatch) -> str:
    """Of everything in it: metadata, and each sample's tensors."""
    digest = hashlib.sha256(repr(batch.samples).encode())
    for module, places in all_of_each(batch.samples).items():
        for place in places:
            for name, tensor in sorted(batch.features(module, place).items()):
                digest.update(f"{module} {place} {name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def sequence(config: RunConfig, num_batches: int, *, begin: int = 0, pause_s: float = 0.0) -> dict[str, Any]:
    """Hashes of the batches that a training process sees from the `begin`-th on, and what its producer counted."""
    producers = open_producers(config)
    loader = Loader(producers.train, 8, seed=3, wanted=all_of_each, batches_ahead=config.data.batches_ahead)
    per_epoch = loader.batches_per_epoch
    loader.load_state({**loader.state(), "epoch": begin // per_epoch, "step": begin % per_epoch})
    digests, skipped = [], []
    for _ in range(num_batches):
        batch = next(loader)
        digests.append(digest_of(batch))
        skipped += batch.skipped
        time.sleep(pause_s)
    loader.close()
    producers.close()
    return {
        "digests": digests,
        "skipped": skipped,
        "received": dict(producers.train.received_bytes),
        "failures": producers.num_failures(),
    }
