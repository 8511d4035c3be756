"""Who may connect to the router, by public key. Owns the table; what a key may do is the core's to say."""

from __future__ import annotations

from scavenger.router.core.events import PeerIdentity


class KeyRing:
    """Who may connect, by public key (Z85). Revoking acts on live sessions: every frame is checked against it."""

    def __init__(self) -> None:
        self._identities: dict[str, PeerIdentity] = {}

    def allow(self, public_key: str, identity: PeerIdentity) -> None:
        self._identities[public_key] = identity

    def revoke(self, public_key: str) -> None:
        self._identities.pop(public_key, None)

    def identity(self, public_key: str) -> PeerIdentity | None:
        return self._identities.get(public_key)

    def callback(self, _domain: str, key: bytes) -> bool:
        """ZAP: pyzmq asks here at each handshake."""
        return key.decode("ascii", "replace") in self._identities
