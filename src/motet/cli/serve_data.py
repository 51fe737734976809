"""`motet serve-data`: prepares samples for training on other machines, until it is terminated."""

import argparse
import ssl
import sys
from pathlib import Path
from typing import Any

from motet.cli.run_file import add_run_file, load_config

HELP = "serve prepared samples to `motet train --data`; requires a token, see docs/data-service.md"

DEFAULT_PORT = 8815


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_file(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to serve on (0.0.0.0: all addresses of the machine; default: %(default)s)",
    )
    parser.add_argument(
        "--port", type=_port, default=DEFAULT_PORT, help="port to serve on (0: any free port; default: %(default)s)"
    )
    parser.add_argument("--tls-cert", metavar="FILE", help="the server's certificate chain, PEM: serve over TLS")
    parser.add_argument("--tls-key", metavar="FILE", help="the server's private key, PEM")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**16:
        raise argparse.ArgumentTypeError(f"{text} is not a port; give 0 to 65535")
    return int(text)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    tls = _read_tls(arguments)
    config = load_config(arguments)
    from motet.data.service.opening import open_server

    server = open_server(config, host=arguments.host, port=arguments.port, tls=tls)
    sizes = " and ".join(f"{number} {split.replace('_', '-')}" for split, number in server.sizes.items())
    report = server.serve_until_signalled(
        lambda: print(f"serving {sizes} samples on {server.address}", file=sys.stderr, flush=True)
    )
    print(f"sent {report['sent_bytes']} bytes for {report['tickets']} requests, refused {report['refused']} calls")
    return report


def _read_tls(arguments: argparse.Namespace) -> tuple[bytes, bytes] | None:
    from motet.errors import UserError

    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise UserError("--tls-cert and --tls-key: one is given without the other; give both or neither")
    if arguments.tls_cert is None:
        return None
    for option, path in (("--tls-cert", arguments.tls_cert), ("--tls-key", arguments.tls_key)):
        if not Path(path).is_file():
            raise UserError(f"{option} {path}: there is no such file; give a PEM file")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(arguments.tls_cert, arguments.tls_key)
    except (OSError, ValueError) as error:
        raise UserError(
            f"--tls-cert {arguments.tls_cert}, --tls-key {arguments.tls_key}: do not match or are not PEM "
            f"({error}); give both in PEM"
        ) from None
    return Path(arguments.tls_cert).read_bytes(), Path(arguments.tls_key).read_bytes()
