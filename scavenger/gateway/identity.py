"""Who may call, and what makes two requests the same: an episode's key, a request's name, hashes. Pure.

An episode's key holds its name and a MAC under the gateway's secret, so that any gateway of the run knows it without a table:

    ep.NAME.MAC      NAME as the daemon has it, MAC = HMAC-SHA256(secret, "episode" NAME), base64url
    cl.NAME.MAC      the same of a client, whose calls the gateway puts into episodes that it begins and ends
    admin.MAC        begins and ends episodes, and gives out keys

Boundary: keys and digests, apart from HTTP so that each rule is tested alone.
"""

from __future__ import annotations

import base64
import hmac
import re
from hashlib import sha256
from typing import Any

import msgspec

from scavenger.protocol.messages import EPISODE_PATTERN, named_request

#: Bytes of the gateway's secret.
SECRET_BYTES = 32
MAX_KEY_CHARS = 512
_NAME = re.compile(EPISODE_PATTERN)
#: Of a client: its episodes' names begin with it.
MAX_CLIENT_CHARS = 64


def _mac(secret: bytes, purpose: bytes, name: str) -> str:
    digest = hmac.new(secret, purpose + b"\0" + name.encode(), sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def is_episode(name: str) -> bool:
    return _NAME.match(name) is not None


def episode_key(secret: bytes, episode: str) -> str:
    """The key that opens exactly this episode."""
    return f"ep.{episode}.{_mac(secret, b'episode', episode)}"


def is_client(name: str) -> bool:
    return len(name) <= MAX_CLIENT_CHARS and is_episode(name)


def client_key(secret: bytes, client: str) -> str:
    """The key that is this client: it opens no episode that others begin."""
    return f"cl.{client}.{_mac(secret, b'client', client)}"


def admin_key(secret: bytes) -> str:
    """The key that begins and ends episodes, and calls for none."""
    return f"admin.{_mac(secret, b'admin', '')}"


def episode_of(secret: bytes, key: str) -> str:
    """The episode that a key opens; "" for anything else. Takes as long for a wrong key as for a right one."""
    name = _named(secret, key, "ep", b"episode")
    return name if is_episode(name) else ""


def client_of(secret: bytes, key: str) -> str:
    """The client whose key it is; "" for anything else."""
    name = _named(secret, key, "cl", b"client")
    return name if is_client(name) else ""


def _named(secret: bytes, key: str, wanted: str, purpose: bytes) -> str:
    kind, _, rest = key[:MAX_KEY_CHARS].partition(".")
    name, _, mac = rest.rpartition(".")
    right = hmac.compare_digest(mac.encode(), _mac(secret, purpose, name).encode())
    return name if kind == wanted and right else ""


def bearer_of(authorization: str) -> str:
    """The key in a header `Authorization`: a bearer's, or the password of a URL's `NAME:KEY@`, which HTTP clients send as Basic
    (RFC 7617). "" for anything else.
    """
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(given.strip(), validate=True).decode().partition(":")[2]
    except ValueError:  # no base64, or no UTF-8
        return ""


def is_admin(secret: bytes, key: str) -> bool:
    return hmac.compare_digest(key[:MAX_KEY_CHARS].encode(), admin_key(secret).encode())


#: What of a body says how it is answered, and nothing of what is generated.
PRESENTATION = frozenset({"stream", "stream_options", "request_id", "user", "metadata", "return_token_ids"})


def content_of(dialect: str, body: dict[str, Any], session: str = "") -> bytes:
    """Hash of what a request asks for: equal for one that is repeated, streamed or not. `session`: of several that one client has, the one
    that asks.
    """
    asked = {key: value for key, value in body.items() if key not in PRESENTATION and value is not None}
    encoded = msgspec.json.encode(asked, order="deterministic")
    whose = b"\0session\0" + session.encode() if session else b""
    return sha256(dialect.encode() + b"\0" + encoded + whose).digest()


def request_of(episode: str, name: str, content: bytes, policy: str = "") -> bytes:
    """What the daemon knows a request of an episode by: the caller's name for it, or its content where it gives none. `policy`: the run
    that is asked, "" for the episode's own.
    """
    if name:
        return named_request(episode, name, policy)
    whose = b"\0policy\0" + policy.encode() if policy else b""
    return sha256(episode.encode() + whose + b"\0content\0" + content).digest()
