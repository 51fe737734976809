"""The producers that a run file asks for: worker processes of this one, or data servers; and the server itself."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import transformers

from motet import __version__
from motet.config import PreparedDataConfig, RunConfig
from motet.data.run_file import data_to_prepare, open_data
from motet.data.service.tickets import Producer, Split, data_facts, read_token
from motet.data.service.workers import LocalProducer, Preparer, Workers
from motet.errors import UserError

if TYPE_CHECKING:
    from motet.data.service.client import Connection
    from motet.data.service.server import DataServer


@dataclass(frozen=True)
class Producers:
    train: Producer
    held_out: Producer | None
    num_failures: Callable[[], int]
    """Workers that were replaced, or calls that another server took over."""

    def close(self) -> None:
        self.train.close()


def open_producers(config: RunConfig) -> Producers:
    """Raises `UserError` naming the key or file that is wrong."""
    data = data_to_prepare(config)
    if data.servers:
        return _remote(config, data)
    workers, sizes = _open_workers(config)
    made = _made({split: LocalProducer(workers, split, size, may_skip=_skips(config)) for split, size in sizes.items()})
    return Producers(*made, lambda: workers.num_restarts)


def batches_ahead(config: RunConfig) -> int:
    return data_to_prepare(config).batches_ahead


def _open_workers(config: RunConfig) -> tuple[Workers, dict[Split, int]]:
    opened = open_data(config)
    datasets: dict[Split, Any] = {"train": opened.train}
    if opened.held_out is not None:
        datasets["held_out"] = opened.held_out
    workers = Workers(Preparer(datasets, checks_all=_skips(config)), data_to_prepare(config).workers)
    return workers, {split: len(dataset) for split, dataset in datasets.items()}


def _skips(config: RunConfig) -> bool:
    return data_to_prepare(config).on_corrupt == "skip"


def _made(producers: dict[Split, Any]) -> tuple[Producer, Producer | None]:
    return producers["train"], producers.get("held_out")


def open_server(config: RunConfig, *, host: str, port: int, tls: tuple[bytes, bytes] | None) -> "DataServer":
    """A server that answers from now on. Raises `UserError`."""
    DataServer = _flight_module("service").DataServer
    token = read_token(data_to_prepare(config).token_file)
    workers, sizes = _open_workers(config)
    contents: dict[str, Any] = {split: dataset.fingerprint for split, dataset in workers.preparer.datasets.items()}
    contents["libraries"] = {name: version(name) for name in LIBRARIES}
    facts = {"data": data_facts(config), "contents": contents, "sizes": sizes, "software": _software()}
    modules = set(config.model.module_names)
    try:
        return DataServer(workers, facts, agreed_digest(facts), sizes, modules, token, host=host, port=port, tls=tls)
    except UserError:
        workers.close()
        raise


LIBRARIES = ("numpy", "pillow", "scipy", "soundfile", "tokenizers")
"""That decode, resize and tokenize. Servers must have the same ones; training needs none of them."""


def _software() -> dict[str, str]:
    """What else decides what a sample becomes."""
    return {"motet": __version__, "transformers": transformers.__version__}


def agreed_digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _remote(config: RunConfig, data: PreparedDataConfig) -> Producers:
    client = _flight_module("client")
    token, roots = read_token(data.token_file), _read_roots(data)
    addresses = list(dict.fromkeys(data.servers))
    for address in addresses:
        check_address(address)
    connections = [client.Connection(address, token, data.server_timeout_s, roots) for address in addresses]
    facts = _agreed_facts(config, connections, data.server_timeout_s)
    servers = client.Servers(connections, agreed_digest(facts), data.server_timeout_s)
    made = _made(
        {
            split: client.RemoteProducer(servers, split, size, facts["contents"][split], may_skip=_skips(config))
            for split, size in facts["sizes"].items()
        }
    )
    return Producers(*made, lambda: sum(servers.num_failures.values()))


def _flight_module(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(f"motet.data.service.{name}")
    except ImportError as error:
        if error.name is None or not error.name.startswith("pyarrow"):
            raise
        raise UserError(
            "data.servers: data servers need pyarrow, which is not installed; pip install 'motet[data-service]'"
        ) from None


def check_address(address: str) -> None:
    """Raises `UserError` unless it is grpc://host:port or grpc+tls://host:port."""
    try:
        parts = urlsplit(address)
        is_one = parts.scheme in ("grpc", "grpc+tls") and parts.hostname and parts.port and not parts.path.strip("/")
    except ValueError:
        is_one = False
    if not is_one:
        raise UserError(
            f"data.servers: {address!r} is no address of a data server; give grpc://host:port or grpc+tls://host:port"
        )


def _read_roots(data: PreparedDataConfig) -> bytes | None:
    if data.tls_roots is None:
        return None
    try:
        return Path(data.tls_roots).read_bytes()
    except OSError as error:
        raise UserError(
            f"data.tls_roots: {data.tls_roots} cannot be read ({error.strerror}); give a PEM file"
        ) from None


def _agreed_facts(config: RunConfig, connections: "Sequence[Connection]", timeout_s: float) -> dict[str, Any]:
    """What the servers that answer say of themselves. Raises `UserError` unless there is one, and they are of one mind
    with the run file."""
    from pyarrow import ArrowException, flight

    own = {"data": json.loads(json.dumps(data_facts(config))), "software": _software()}
    gives_up_s = time.monotonic() + timeout_s
    seen: dict[str, dict[str, Any]] = {}
    reason = ""
    while not seen:
        for connection in connections:
            try:
                seen[connection.address] = connection.describe()
            except flight.FlightUnauthenticatedError:
                raise UserError(
                    f"data.servers: {connection.address} refuses the token; give servers and training the same one"
                ) from None
            except (flight.FlightError, ArrowException, OSError) as error:
                reason = f"{connection.address}: {' '.join(str(error).split())[:160]}"
        if not seen and time.monotonic() > gives_up_s:
            raise UserError(
                f"data.servers: none of {', '.join(c.address for c in connections)} answers ({reason}); "
                "start motet serve-data there, or mend the addresses"
            )
        if not seen:
            time.sleep(0.2)
    first = next(iter(seen.values()))
    for address, facts in seen.items():
        for other, whose in ((own, "this run file"), (first, next(iter(seen)))):
            differing = [*_differences("", {key: facts[key] for key in other}, other)]
            if differing:
                raise UserError(
                    f"data.servers: {address} prepares other data than {whose}: {'; '.join(differing[:3])}; "
                    "start it with the same run file and data"
                )
    return first


def _differences(key: str, there: Any, here: Any) -> list[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [*here, *(name for name in there if name not in here)]
        return [line for name in keys for line in _differences(f"{key}.{name}", there.get(name), here.get(name))]
    return [] if there == here else [f"{key.removeprefix('.').removeprefix('data.')} is {there!r} there, {here!r} here"]
