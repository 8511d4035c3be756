"""How a receiver connects to one source: the nearest way that works, and no word twice of one that does not.

    on this machine   the holder's memory, by a descriptor that it passes
    a spool           its file
    else              under CURVE where the source has a key; by NIXL where both have it; TCP

Owns no connection. Used by one thread.
"""

from __future__ import annotations

import structlog

from scavenger.errors import WeightsError, WireError
from scavenger.protocol import messages
from scavenger.protocol.keys import KeyPair
from scavenger.weights.channel import Channel, FileChannel, SharedContext, TcpChannel, ZmqChannel, boot_id
from scavenger.weights.channel_rdma import RdmaChannel
from scavenger.weights.manifest import Manifest
from scavenger.weights.spool import SCHEME

_log = structlog.get_logger(__name__)


class ConnectionFactory:
    """Of one source. Errors of a connection are `OSError` or `WireError`.

    `no_nixl`: the endpoints with which NIXL failed, shared by all who open; a holder that starts anew has another.
    """

    def __init__(
        self,
        source: messages.WeightSource,
        keypair: KeyPair,
        context: SharedContext,
        timeout_s: float,
        no_nixl: set[str],
    ) -> None:
        self._source, self._keypair, self._context, self._timeout_s = source, keypair, context, timeout_s
        self.near = source.local.partition(":")[0] == boot_id()
        self._reported = False  # that its memory could not be had
        self._no_nixl = not source.nixl
        self._failed = no_nixl

    def open(self, manifest: Manifest) -> Channel:
        source = self._source
        if source.endpoint.startswith(SCHEME):
            return FileChannel.open(source.endpoint.removeprefix(SCHEME), manifest)
        found = self._neighbour(manifest)
        if found is not None:
            return found
        if source.server_key:
            return ZmqChannel(source, manifest.version, self._keypair, self._context, manifest.chunk_nbytes)
        return self._by_nixl(manifest) or TcpChannel.connect(source, manifest.version, self._timeout_s)

    def nixl_failed(self, reason: str) -> None:
        """It connected, and then did not carry the bytes: TCP from here on, or it would connect and fail for ever."""
        if self._source.endpoint not in self._failed:
            _log.warning(
                "weights.nixl_failed",
                source=self._source.endpoint,
                reason=f"{reason}; it is read by TCP from here on",
            )
        self._failed.add(self._source.endpoint)

    def _neighbour(self, manifest: Manifest) -> Channel | None:
        if not self.near:
            return None
        try:
            return FileChannel.neighbour(self._source, manifest, self._timeout_s)
        except (OSError, WireError) as error:  # another network namespace, perhaps: the network remains
            if not self._reported:  # it is tried again with each connection
                _log.info("weights.no_shared_memory", source=self._source.endpoint, reason=str(error))
            self._reported = True
            return None

    def _by_nixl(self, manifest: Manifest) -> Channel | None:
        if self._no_nixl or self._source.endpoint in self._failed:
            return None
        try:
            return RdmaChannel.connect(self._source, manifest, self._timeout_s)
        except (OSError, WireError, WeightsError) as error:  # not installed here, perhaps: TCP remains
            self._no_nixl = True
            _log.info("weights.no_nixl", source=self._source.endpoint, reason=str(error))
            return None
