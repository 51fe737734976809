"""Data servers over TLS: with the authority that signed their certificate, and with nobody else."""

from pathlib import Path

import pytest
from certificates import CERTIFICATE, KEY
from data_servers import batches, data_config, serving, training, with_servers

from motet.errors import UserError


def test_the_same_batches_over_tls_and_nothing_without(tmp_path: Path) -> None:
    config = data_config(workers=0, server_timeout_s=2.0)
    roots = tmp_path / "roots.pem"
    roots.write_bytes(CERTIFICATE)
    with serving(config, tls=(CERTIFICATE, KEY)) as (server,):
        assert server.address.startswith("grpc+tls://127.0.0.1:")
        with training(with_servers(config, server.address, tls_roots=str(roots))) as client:
            assert client.next(2) == batches(data_config(workers=0), 2)
        for address in (server.address, server.address.replace("grpc+tls", "grpc")):
            with (
                training(with_servers(config, address)) as client,
                pytest.raises(UserError, match=r"data.servers: none of .* answers"),
            ):
                client.next(1)
