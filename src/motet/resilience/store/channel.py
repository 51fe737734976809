"""An authenticated channel: JSON messages between two processes that share a secret.

    server -> client   magic, nonce of the server
    client -> server   nonce of the client, HMAC(secret, "client", both nonces)
    server -> client   HMAC(secret, "server", both nonces)
    either -> other    length, HMAC(key of the direction, number of the message, JSON), JSON

Nothing that a peer says is read before it has proved that it knows the secret, and each side proves it. Messages are
JSON, limited in size, and carry an HMAC, so nobody in between can change, repeat or reorder them.

Limits: nothing is encrypted.
"""

import hashlib
import hmac
import json
import os
import socket
import struct
import time
from typing import Any

from motet.addresses import Address, address_text

MAX_MESSAGE_BYTES = 64 * 2**20
"""Largest message: a plan of many thousand ranks is a few MiB."""
HANDSHAKE_S = 5.0
"""Time for a peer to prove that it knows the secret."""
_MAGIC = b"motet-1\n"
_NONCE_BYTES = 32
_TAG_BYTES = hashlib.sha256().digest_size
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")


class ChannelClosedError(ConnectionError):
    """The peer does not answer, or has ended the connection."""


class UntrustedPeerError(ConnectionError):
    """The peer did not prove that it knows the secret."""


class MalformedMessageError(ValueError):
    """A peer that knows the secret has sent something that is not a message."""


class Channel:
    """One end of an authenticated connection."""

    def __init__(self, connection: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self._connection, self._send_key, self._receive_key = connection, send_key, receive_key
        self._num_sent = self._num_received = 0
        self.here: str = connection.getsockname()[0]
        """This machine's address, as the peer sees it."""

    def send(self, message: Any, timeout_s: float | None = None) -> None:
        content = json.dumps(message).encode()
        tag = hmac.digest(self._send_key, _NUMBER.pack(self._num_sent) + content, "sha256")
        self._num_sent += 1
        _write(self._connection, _LENGTH.pack(len(content)) + tag + content, timeout_s)

    def receive(self, timeout_s: float | None = None) -> Any:
        """Waits for the next message; None: without limit."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        (length,) = _LENGTH.unpack(_read(self._connection, _LENGTH.size, deadline))
        if length > MAX_MESSAGE_BYTES:
            raise MalformedMessageError(f"a message of {length} bytes; at most {MAX_MESSAGE_BYTES} are read")
        tag, content = _read(self._connection, _TAG_BYTES, deadline), _read(self._connection, length, deadline)
        expected = hmac.digest(self._receive_key, _NUMBER.pack(self._num_received) + content, "sha256")
        if not hmac.compare_digest(tag, expected):
            raise MalformedMessageError("a message whose HMAC is wrong")
        self._num_received += 1
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise MalformedMessageError(f"a message that is not JSON ({error})") from None

    def close(self) -> None:
        self._connection.close()


def accept_channel(connection: socket.socket, secret: bytes) -> Channel:
    """The server's side of the handshake. Raises `UntrustedPeerError` or `ChannelClosedError`."""
    deadline, ours = time.monotonic() + HANDSHAKE_S, os.urandom(_NONCE_BYTES)
    _write(connection, _MAGIC + ours, HANDSHAKE_S)
    theirs = _read(connection, _NONCE_BYTES, deadline)
    proof = _read(connection, _TAG_BYTES, deadline)
    if not hmac.compare_digest(proof, _derived(secret, b"client", ours, theirs)):
        raise UntrustedPeerError("it does not know the secret of this run")
    _write(connection, _derived(secret, b"server", ours, theirs), HANDSHAKE_S)
    keys = (_derived(secret, b"from " + side, ours, theirs) for side in (b"server", b"client"))
    return Channel(connection, *keys)


def open_channel(address: Address, secret: bytes, timeout_s: float) -> Channel:
    """Connects to a server. Raises `ChannelClosedError` if nobody answers in time, `UntrustedPeerError` if what answers
    does not know the secret, or says that this process does not."""
    try:
        connection = socket.create_connection(address, timeout=timeout_s)
    except (OSError, UnicodeError) as error:
        raise ChannelClosedError(f"no server answers at {address_text(address)} ({error})") from None
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        deadline, ours = time.monotonic() + timeout_s, os.urandom(_NONCE_BYTES)
        if _read(connection, len(_MAGIC), deadline) != _MAGIC:
            raise UntrustedPeerError("it is not a training of motet")
        theirs = _read(connection, _NONCE_BYTES, deadline)
        _write(connection, ours + _derived(secret, b"client", theirs, ours), timeout_s)
        try:
            proof = _read(connection, _TAG_BYTES, deadline)
        except ChannelClosedError:
            raise UntrustedPeerError("it refuses this process: do both have the same secret?") from None
        if not hmac.compare_digest(proof, _derived(secret, b"server", theirs, ours)):
            raise UntrustedPeerError("it does not know the secret of this run")
        keys = (_derived(secret, b"from " + side, theirs, ours) for side in (b"client", b"server"))
        return Channel(connection, *keys)
    except BaseException:
        connection.close()
        raise


def _derived(secret: bytes, purpose: bytes, of_server: bytes, of_client: bytes) -> bytes:
    return hmac.digest(secret, b"motet " + purpose + of_server + of_client, "sha256")


def _read(connection: socket.socket, num_bytes: int, deadline: float | None) -> bytes:
    content = bytearray()
    try:
        while len(content) < num_bytes:
            connection.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
            part = connection.recv(min(2**20, num_bytes - len(content)))
            if not part:
                raise ChannelClosedError("the connection was closed")
            content += part
    except TimeoutError:
        raise ChannelClosedError("it is silent") from None
    except OSError as error:
        raise ChannelClosedError(str(error)) from None
    return bytes(content)


def _write(connection: socket.socket, content: bytes, timeout_s: float | None) -> None:
    try:
        connection.settimeout(timeout_s)
        connection.sendall(content)
    except OSError as error:
        raise ChannelClosedError(str(error)) from None
