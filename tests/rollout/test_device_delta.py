"""Deltas applied by torch are, to the byte, those applied by a core; what is no delta is refused alike."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest

from scavenger.errors import WeightsError
from scavenger.weights import delta

torch = pytest.importorskip("torch", reason="the engines need the [trainer] extra")
device_delta = pytest.importorskip("rollout.engines.device_delta")

NBYTES = 1 << 14
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def after(old: bytes, share: float, width: int, seed: int, most: int = 3) -> bytes:
    """The same with some items changed a little, as an optimizer step does, and some much."""
    draws, items = random.Random(seed), bytearray(old)
    for at in range(0, len(old), width):
        if draws.random() < share:
            value = int.from_bytes(items[at : at + width], "little")
            change = draws.randint(-most, most) if draws.random() < 0.9 else draws.getrandbits(8 * width)
            items[at : at + width] = ((value + change) % (1 << 8 * width)).to_bytes(width, "little")
    return bytes(items)


def chained(versions: list[bytes], width: int) -> memoryview:
    pairs = itertools.pairwise(versions)
    return memoryview(
        delta.chain([delta.encode(memoryview(old), memoryview(new), width) for old, new in pairs])
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.004, 0.03, 0.5, 1.0])
def test_the_bytes_are_those_that_a_core_makes(device: str, width: int, share: float) -> None:
    versions = [os.urandom(NBYTES)]
    for seed in range(3):
        versions.append(after(versions[-1], share, width, seed))
    encoded = chained(versions, width)
    apply, expected, found = device_delta.DeviceApply(device), bytearray(NBYTES), bytearray(NBYTES)
    delta.apply_chain(memoryview(versions[0]), encoded, memoryview(expected))
    apply(memoryview(versions[0]), encoded, memoryview(found))
    assert bytes(expected) == versions[-1]
    assert found == expected


def test_a_chunk_with_a_rest_of_less_than_four_items_is_applied_too() -> None:
    old = os.urandom(2 * 1021)
    new = after(old, 0.5, 2, 1)
    found = bytearray(len(old))
    device_delta.DeviceApply("cpu")(memoryview(old), chained([old, new], 2), memoryview(found))
    assert bytes(found) == new


def test_what_is_no_delta_of_the_chunk_is_refused_as_a_core_refuses_it() -> None:
    old = os.urandom(NBYTES)
    whole = bytes(chained([old, after(old, 0.5, 2, 1)], 2))
    apply, into = device_delta.DeviceApply("cpu"), memoryview(bytearray(NBYTES))
    half = memoryview(bytearray(NBYTES // 2))
    for wrong, chunk in ((whole[:-5], into), (b"junk", into), (whole, half)):
        for one in (apply, delta.apply_chain):
            with pytest.raises(WeightsError):
                one(memoryview(old)[: len(chunk)], memoryview(wrong), chunk)


def test_a_device_that_fails_leaves_the_work_to_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    old = os.urandom(NBYTES)
    new = after(old, 0.5, 2, 1)
    apply, found = device_delta.DeviceApply("cpu"), bytearray(NBYTES)
    tries = []

    def fails(*_: Any) -> None:
        tries.append(1)
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(apply, "_change", fails)
    for _ in range(2):
        found[:] = bytes(NBYTES)
        apply(memoryview(old), chained([old, new], 2), memoryview(found))
        assert bytes(found) == new
    assert len(tries) == 1
