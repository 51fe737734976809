"""Opens the producers that a run file asks for (worker processes of this one, or data servers), and data servers."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import transformers

from motet import __version__
from motet.config import PreparedDataConfig, RunConfig
from motet.data.run_file import data_to_prepare, open_data
from motet.data.service.tickets import Producer, Split, data_facts, read_token
from motet.data.service.workers import LocalProducer, Preparer, Workers
from motet.errors import UserError, one_line
from motet.families.configured_graph import read_graph
from motet.named_files import read_bytes

if TYPE_CHECKING:
    from motet.data.service.client import Connection
    from motet.data.service.server import DataServer

LIBRARIES = ("av", "numpy", "pillow", "scipy", "soundfile", "tokenizers")
"""Libraries that decode, resize and tokenize. All servers must have the same versions; training needs none of them."""


@dataclass(frozen=True)
class Producers:
    train: Producer
    held_out: Producer | None
    num_failures: Callable[[], int]
    """The number of workers that were replaced, or of calls that another server took over."""

    def close(self) -> None:
        self.train.close()


def open_producers(config: RunConfig) -> Producers:
    """Raises `UserError` naming the key or file that is wrong."""
    data = data_to_prepare(config)
    skips = data.on_corrupt == "skip"
    made: dict[Split, Producer]
    if not data.servers:
        workers, sizes = _open_workers(config, data)
        made = {split: LocalProducer(workers, split, size, may_skip=skips) for split, size in sizes.items()}
        return Producers(made["train"], made.get("held_out"), lambda: workers.num_restarts)
    client = _import_flight("client")
    token, roots = read_token(data.token_file), _read_roots(data)
    addresses = list(dict.fromkeys(data.servers))
    for address in addresses:
        check_address(address)
    connections = [client.Connection(address, token, data.server_timeout_s, roots) for address in addresses]
    facts = _agreed_facts(config, connections, data.server_timeout_s)
    servers = client.Servers(connections, agreed_digest(facts), data.server_timeout_s)
    contents = facts["contents"]
    made = {
        split: client.RemoteProducer(servers, split, size, contents[split], may_skip=skips)
        for split, size in facts["sizes"].items()
    }
    return Producers(made["train"], made.get("held_out"), lambda: sum(servers.num_failures.values()))


def _open_workers(config: RunConfig, data: PreparedDataConfig) -> tuple[Workers, dict[Split, int]]:
    """Workers for all data sets, and the number of samples of each."""
    opened = open_data(config)
    datasets: dict[Split, Any] = {"train": opened.train}
    if opened.held_out is not None:
        datasets["held_out"] = opened.held_out
    workers = Workers(Preparer(datasets, checks_all=data.on_corrupt == "skip"), data.workers)
    return workers, {split: len(dataset) for split, dataset in datasets.items()}


def open_server(config: RunConfig, *, host: str, port: int, tls: tuple[bytes, bytes] | None) -> "DataServer":
    """Starts a data server. Raises `UserError`."""
    server = _import_flight("server")
    data = data_to_prepare(config)
    token = read_token(data.token_file)
    workers, sizes = _open_workers(config, data)
    contents: dict[str, Any] = {split: dataset.fingerprint for split, dataset in workers.preparer.datasets.items()}
    contents["libraries"] = _library_versions()
    facts = {"data": data_facts(config), "contents": contents, "sizes": sizes, "software": _software()}
    modules = set(read_graph(config).names)
    try:
        return server.DataServer(
            workers, facts, agreed_digest(facts), sizes, modules, token, host=host, port=port, tls=tls
        )
    except UserError:
        workers.close()
        raise


def _library_versions() -> dict[str, str]:
    """Versions of the libraries that are installed."""
    found = {}
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _software() -> dict[str, str]:
    return {"motet": __version__, "transformers": transformers.__version__}


def agreed_digest(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _import_flight(name: str) -> Any:
    """Imports a module of this package that needs pyarrow."""
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
            f"data.servers: {address!r} is not a data server's address; give grpc://host:port or grpc+tls://host:port"
        )


def _read_roots(data: PreparedDataConfig) -> bytes | None:
    if data.tls_roots is None:
        return None
    try:
        return read_bytes(data.tls_roots)
    except OSError as error:
        raise UserError(
            f"data.tls_roots: {data.tls_roots} cannot be read ({error.strerror}); give a PEM file"
        ) from None


def _agreed_facts(config: RunConfig, connections: "Sequence[Connection]", timeout_s: float) -> dict[str, Any]:
    """The facts of the servers that answer. Raises `UserError` unless at least one answers, and all of them agree with
    the run file and with one another."""
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
                reason = f"{connection.address}: {one_line(error)[:160]}"
        if not seen and time.monotonic() > gives_up_s:
            raise UserError(
                f"data.servers: none of {', '.join(c.address for c in connections)} answers ({reason}); "
                "start motet serve-data there, or correct the addresses"
            )
        if not seen:
            time.sleep(0.2)
    first = next(iter(seen.values()))
    for address, facts in seen.items():
        for other, whose in ((own, "this run file"), (first, next(iter(seen)))):
            differing = [*_differences("", {key: facts[key] for key in other}, other)]
            if differing:
                raise UserError(
                    f"data.servers: {address} prepares different data from {whose}: {'; '.join(differing[:3])}; "
                    "start it with the same run file and data"
                )
    return first


def _differences(key: str, there: Any, here: Any) -> list[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [*here, *(name for name in there if name not in here)]
        return [line for name in keys for line in _differences(f"{key}.{name}", there.get(name), here.get(name))]
    return [] if there == here else [f"{key.removeprefix('.').removeprefix('data.')} is {there!r} there, {here!r} here"]
