"""What a connection begins with. Imports without torch: launchers use it.

Magic and version, the sender's rank, and a keyed digest of the run's token, which proves membership
and does not give the token away. The size is fixed: what has not been compared yet is never parsed.
"""

from __future__ import annotations

import hmac
import struct

MAGIC = b"orchestra"
VERSION = 1
WATCHER = -1
"""The watcher's number, where ranks have theirs."""

_HELLO = struct.Struct(f"<{len(MAGIC)}sBI")
HELLO_BYTES = _HELLO.size + 32


def hello(sender: int, receiver: int, token: bytes) -> bytes:
    """What `sender` says first, [HELLO_BYTES]: to `receiver` alone it proves that it belongs."""
    proof = hmac.digest(token, b"%d to %d" % (sender, receiver), "sha256")
    return _HELLO.pack(MAGIC, VERSION, sender) + proof


def sender_of(said: bytes) -> int:
    """The rank that a hello claims to be from."""
    _, _, sender = _HELLO.unpack_from(said)
    return int(sender)


def proves(said: bytes, sender: int, receiver: int, token: bytes) -> bool:
    """Whether `said` is the hello of `sender` to `receiver`."""
    return hmac.compare_digest(said, hello(sender, receiver, token))
