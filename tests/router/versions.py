"""Versions as trainers publish them, adapters among them, and what engines are asked to load of them."""

from __future__ import annotations

import msgspec

from scavenger.protocol.messages import Ok, PublishVersion, UseWeights
from scavenger.weights import manifest as manifests
from tests.router.harness import SOURCE, Bench, specs

MERGED, OTHER = b"m" * 32, b"o" * 32


def asked(bench: Bench, conn: int) -> list[UseWeights]:
    return bench.take(conn, UseWeights)


def made(number: int, base: bytes = b"", step: int = 0) -> PublishVersion:
    """A version as a trainer publishes it: adapters where `base` names what they are merged with."""
    adapter = manifests.Adapter(base, 2.0, "bfloat16") if base else None
    value = memoryview(bytes([number if base else 0]))  # all bases are equal
    manifest, _ = manifests.build(number, {"w": ("int8", (1,), value)}, adapter=adapter)
    return PublishVersion(number, step, manifest.root, manifests.encode(manifest), (SOURCE,))


def stating(number: int, base: bytes, merged: bytes) -> PublishVersion:
    """Adapters of which their trainer says what they make of their base."""
    body = made(number, base)
    manifest = msgspec.structs.replace(manifests.decode(body.manifest), merged=merged)
    return msgspec.structs.replace(body, manifest=manifests.encode(manifest))


def with_stated() -> tuple[Bench, PublishVersion]:
    bench = Bench()
    bench.open()
    base = made(1)
    adapters = stating(2, base.root, MERGED)
    assert [bench.call(base), bench.call(adapters)] == [Ok(), Ok()]
    bench.submit(version=2, groups=specs(1, n=2))
    bench.auto = True
    return bench, adapters
