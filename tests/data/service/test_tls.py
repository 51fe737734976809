"""Data servers over TLS: with the authority that signed their certificate, and with nobody else."""

from pathlib import Path

import pytest
from data_servers import batches, data_config, serving, training, with_servers

from motet.errors import UserError

KEY = b"""\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgRyW1YrltTQEf7CcO
JDzgUUgz2wltSZlETnzwdx8WViyhRANCAARg6q8t0byA4FR1FtnzIBQGa797hz1o
fuTMl9zS6trvUQ4bW4oBh8vbsRREz80Qu++JkZsnvWXl7m4Qr30odro0
-----END PRIVATE KEY-----
"""
"""Of nothing but these tests."""

CERTIFICATE = b"""\
-----BEGIN CERTIFICATE-----
MIIBnDCCAUOgAwIBAgIUNkBHvE0sex2YqJ3is/TDnJTM/DMwCgYIKoZIzj0EAwIw
FTETMBEGA1UEAwwKbW90ZXQgdGVzdDAgFw0yNjExMjIwNDE0MzFaGA8yMTI2MTAy
OTA0MTQzMVowFTETMBEGA1UEAwwKbW90ZXQgdGVzdDBZMBMGByqGSM49AgEGCCqG
SM49AwEHA0IABGDqry3RvIDgVHUW2fMgFAZrv3uHPWh+5MyX3NLq2u9RDhtbigGH
y9uxFETPzRC774mRmye9ZeXubhCvfSh2ujSjbzBtMB0GA1UdDgQWBBSzVxL7It7S
LOXEtw1NGIBPRulBUDAfBgNVHSMEGDAWgBSzVxL7It7SLOXEtw1NGIBPRulBUDAP
BgNVHRMBAf8EBTADAQH/MBoGA1UdEQQTMBGHBH8AAAGCCWxvY2FsaG9zdDAKBggq
hkjOPQQDAgNHADBEAiBI8W8jvLqDJ7/jVHDEh/nmO3tVDKYD1bfROJP7AnXgwQIg
SW50HbinitU33/P9ZjAC7nsLSKjwWK4v3pu6BiTxdr8=
-----END CERTIFICATE-----
"""
"""Signed by itself, for 127.0.0.1, until 2126."""


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
