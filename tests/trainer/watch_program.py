"""Ranks that train nothing, to be stopped or told to end: `mpirun -n N python watch_program.py OUT`.

Rank 0 sends frames to all ranks and waits for their answers, as `trainer.loop.ranks` does, until it is told to end; every rank leaves its
process id in OUT. The watchdog names a rank after two seconds and ends the job after four. No torch: two of these start in a moment.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trainer.loop.comm import Comm, connect
from trainer.loop.ending import SIGTERM_EXIT, Ending, EndRequested, ignore
from trainer.loop.watchdog import Here, RankWatch, meet


def serve(comm: Comm, here: Here) -> None:
    while True:
        with here.at("waiting for rank 0", idle=True):
            frame = comm.receive()
        if frame == b"stop":
            return
        with here.at("Train", command=True):
            comm.reply(frame)


def main(out: Path) -> int:
    comm, here = connect(idle_poll_ms=5.0), Here()
    watch = RankWatch(meet(comm), here, stuck_s=2.0, end_s=4.0)
    watch.start()
    if comm.rank:
        ignore()
    mark = out / f"rank-{comm.rank}"
    mark.with_suffix(".new").write_text(str(os.getpid()))
    mark.with_suffix(".new").rename(mark)
    if comm.rank:
        serve(comm, here)
        return 0
    ending = Ending()
    ending.listen()
    (out / "listening").touch()
    try:
        while True:
            with here.at("Train", command=True):
                comm.send([b"train"] * comm.size)
            with here.at("waiting for answers to Train"):
                comm.replies()
            ending.check()
    except EndRequested as request:
        print(f"told by {request}", flush=True)
        comm.send([b"stop"] * comm.size)
        watch.stop()
        return SIGTERM_EXIT


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
