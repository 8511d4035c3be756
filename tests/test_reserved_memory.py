"""Whether memory is free, from what the daemon and the launcher say; and what these two files may hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from scavenger.errors import ConfigError
from scavenger.protocol.messages import Fleet, reserved_name
from scavenger.protocol.reserved_memory import ReservedObservation, observe
from scavenger.protocol.train_step import ReservedAsleep, ReservedHolds
from trainer.engine_control import MAX_BYTES, VARIABLE, Engines, Launcher, Present, RequestedEngines, of_job

ORDER = 7


def named(slots: str) -> tuple[str, ...]:
    return tuple(reserved_name(slot, "session") for slot in slots)


def fleet(asleep: str = "", holding: str = "", order: int = ORDER) -> Fleet:
    return Fleet(
        0, 0, 0, 0, 0, order=order, asleep=named(asleep), holding=named(holding), bytes_held=512 * len(asleep)
    )


def present(running: str, slots: str = "012") -> Present:
    return Present(3, tuple(slots), named(running))


@pytest.mark.parametrize(
    ("heard", "processes", "expected"),
    [
        (fleet("01"), present("01"), ReservedObservation(ReservedAsleep(2, 1024))),
        (fleet("01"), present("0"), ReservedObservation(ReservedAsleep(2, 1024))),  # one died asleep
        (fleet("0", "1"), present("01"), ReservedObservation(ReservedHolds(named("1")), ending=named("1"))),
        (
            fleet("0", "1"),
            present("0"),
            ReservedObservation(ReservedHolds(named("1")), gone=named("1")),
        ),  # the daemon is to be told first
        (
            fleet("0"),
            present("01"),
            ReservedObservation(ReservedHolds(named("1")), ending=named("1")),
        ),  # it starts, and nobody has heard of it
        (
            fleet("0", "x"),
            present("0"),
            ReservedObservation(ReservedHolds(named("x"))),
        ),  # another's, which is not ours to end
        (fleet("0", "0"), present("0"), ReservedObservation(ReservedHolds(named("0")), ending=named("0"))),
        # Another process of the same slot sleeps: one that the launcher lost, while the one that it started is at work.
        (
            fleet("0"),
            Present(3, ("0",), ("0.newer",)),
            ReservedObservation(ReservedHolds(("0.newer",)), ending=("0.newer",)),
        ),
        # An older word's answer, as of a daemon that is away: nothing is known, and whoever runs can be ended.
        (fleet("01", order=ORDER - 1), present("01"), ReservedObservation(None, ending=named("01"))),
        (fleet("01"), None, ReservedObservation(None)),  # the launcher has not acted upon the last word
    ],
)
def test_memory_is_free_when_all_acknowledged_the_newest_order_or_have_no_process(
    heard: Fleet, processes: Present | None, expected: ReservedObservation
) -> None:
    assert observe(heard, ORDER, processes, launched=True) == expected


def test_where_nobody_launched_the_engines_the_daemon_alone_says_it() -> None:
    assert observe(fleet("0"), ORDER, None, launched=False) == ReservedObservation(ReservedAsleep(1, 512))
    assert observe(fleet("0", "1"), ORDER, None, launched=False) == ReservedObservation(
        ReservedHolds(named("1"))
    )


def test_rank_0_believes_the_launcher_once_it_acted_upon_the_last_word() -> None:
    launcher = Launcher()
    try:
        engines = of_job({VARIABLE: str(launcher.folder)})
        assert engines is not None
        assert (launcher.wanted(), launcher.folder.stat().st_mode & 0o777) == (RequestedEngines(), 0o700)
        engines.want(False)
        launcher.say(Present(0, ("0",), ("0",)))
        assert engines.present() is None
        assert launcher.wanted() == RequestedEngines(1, False)
        launcher.say(Present(1, ("0",), ("0",)))
        assert engines.present() == Present(1, ("0",), ("0",))
        engines.end(("0",), "late")
        assert engines.present() is None
        assert launcher.wanted() == RequestedEngines(2, False, ("0",), "late")
    finally:
        launcher.close()
    assert of_job({VARIABLE: str(launcher.folder)}) is None
    assert of_job({}) is None


@pytest.mark.parametrize(
    "data", [b"{", b'{"number": -1}', b'{"number": 1, "more": 1}', b'{"slots": [1]}', b" " * (MAX_BYTES + 1)]
)
def test_what_is_no_word_of_the_other_is_an_error_and_no_empty_answer(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "present.json").write_bytes(data)
    with pytest.raises(
        ConfigError, match=r"present\.json is not what the launcher and rank 0 tell each other"
    ):
        Engines(tmp_path).present()
