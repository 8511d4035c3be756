"""`scripts/chaos`: see `--help`. Exit status 0: every count that must be 0 is 0, and every fault was done."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from scavenger.errors import ScavengerError
from tests.chaos.audit import table
from tests.chaos.choose import KINDS
from tests.chaos.run import Chaos, Options, Outcome
from tests.system import agents, play
from tests.system.model import write_small_model


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def undisturbed(work: Path, model: Path, steps: int, *, episodes: bool = False) -> play.Result:
    """The same run with nobody hurt, on one reserved engine; played once for each work folder and code."""
    code = hashlib.sha256()
    for path in sorted(
        p for part in ("trainer", "rollout", "tests/system") for p in (play.ROOT / part).rglob("*.py")
    ):
        code.update(path.read_bytes())
    what = "episodes" if episodes else "samples"
    cache = work / f"reference-{what}-{steps}-{code.hexdigest()[:12]}.json"
    if not cache.exists():
        say(f"the undisturbed run of {steps} steps, for comparison")
        here = work / f"undisturbed-{os.getpid()}"
        if episodes:
            here.mkdir()
            with agents.ToolServer().serving() as tool:
                result = agents.undisturbed(agents.plain(model, tool, here), here / "site", steps)
        else:
            result = play.undisturbed(model, here, steps)
        shutil.rmtree(here)
        tokens = [[*key, data.hex()] for key, data in sorted(result.tokens.items())]
        cache.write_text(
            json.dumps(
                {"tokens": tokens, "steps": [[step, *found] for step, found in sorted(result.steps.items())]}
            )
        )
    known = json.loads(cache.read_text())
    tokens_of: dict[tuple[int, ...], bytes] = {
        tuple(place): bytes.fromhex(data) for *place, data in known["tokens"]
    }
    return play.Result(tokens_of, {step: (reward, loss) for step, reward, loss in known["steps"]})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos", description="Hurt a real run at random moments, then audit its ledger."
    )
    parser.add_argument("--kills", type=int, default=50, help="processes to kill (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="chooses every fault")
    parser.add_argument("--backend", choices=("local", "slurm"), default="local")
    parser.add_argument("--database", choices=("sqlite", "postgres"), default="sqlite")
    parser.add_argument(
        "--faults",
        default="kill,stop,hole",
        help=f"of {','.join(KINDS)} (disk needs root; default: kill, stop, hole)",
    )
    parser.add_argument(
        "--off-policy",
        type=int,
        choices=range(17),
        default=0,
        help="steps that are generated in advance, 0 to 16 (default 0), with kv = keep; the reference engine keeps no cache",
    )
    parser.add_argument(
        "--move-kv",
        action="store_true",
        help="samples that move take their KV blocks along (engine.move_kv); engines are told to leave too (fault notice)",
    )
    parser.add_argument(
        "--episodes",
        choices=("none", "external"),
        default="",
        metavar="EFFECTS",
        help="a run of agents with a tool whose data.effects are none or external: gateways and environment workers are killed too, "
        "and the training job is left alone",
    )
    parser.add_argument("--steps", type=int, default=0, help="of the run (default: grows with --kills)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=20.0,
        help="the run fails when it is not finished by then (default 20)",
    )
    parser.add_argument(
        "--dir",
        type=Path,
        help="work folder, kept; the undisturbed run is cached there (default: a temporary one)",
    )
    parser.add_argument("--json", action="store_true", help="print the audit as JSON")
    return parser


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    args = _parser().parse_args()
    signal.signal(signal.SIGTERM, _interrupted)
    work = args.dir.resolve() if args.dir else Path(tempfile.mkdtemp(prefix="scavenger-chaos-"))
    steps = args.steps or max(4, args.kills // 4)
    kinds = tuple(args.faults.split(",")) + (("notice",) if args.move_kv else ())
    site = work / f"run-{os.getpid()}"
    options = Options(
        site,
        args.seed,
        args.kills,
        steps,
        kinds,
        args.backend,
        args.database,
        deadline_s=60 * args.minutes,
        off_policy=args.off_policy,
        episodes=args.episodes,
        move_kv=args.move_kv,
    )
    try:
        model = work / "model"
        if not (model / "model.safetensors").exists():
            write_small_model(model)
        outcome = Chaos(options, model, say).play(
            undisturbed(work, model, steps, episodes=bool(args.episodes))
        )
    except KeyboardInterrupt:
        say("stopped; nothing is left running")
        return 130
    except (AssertionError, ScavengerError, ValueError) as error:
        say(f"chaos: {error}\nwhat is left: {site}")
        return 1
    print(_as_json(options, outcome) if args.json else _as_table(options, outcome))
    if outcome.sound and not args.dir:
        shutil.rmtree(work)
    elif not outcome.sound:
        say(f"what is left: {site}")
    return 0 if outcome.sound else 1


def _faults(outcome: Outcome) -> dict[str, int]:
    ended = len(outcome.own_ends)
    return {
        **dict(sorted(outcome.done.items())),
        "planned and not done": outcome.left,
        "daemons that ended by themselves": ended,
    }


def _as_table(options: Options, outcome: Outcome) -> str:
    kills = sum(count for name, count in outcome.done.items() if name.startswith("kill"))
    ahead = f", {options.off_policy} in advance" if options.off_policy else ""
    where = f"{options.backend}, {options.database}, seed {options.seed}"
    title = f"{kills} kills, {options.steps} steps{ahead}, {where}: {outcome.wall_s:.0f} s"
    return table(title, outcome.audit, _faults(outcome))


def _as_json(options: Options, outcome: Outcome) -> str:
    asked = {
        "seed": options.seed,
        "backend": options.backend,
        "database": options.database,
        "steps": options.steps,
        "off_policy": options.off_policy,
    }
    found = outcome.audit
    return json.dumps(
        {
            **asked,
            "wall_s": round(outcome.wall_s, 1),
            "sound": outcome.sound,
            "faults": _faults(outcome),
            "counts": dict(found.counts),
            "facts": dict(found.facts),
            "found": [*outcome.own_ends, *found.found],
        },
        indent=2,
    )


if __name__ == "__main__":
    sys.exit(main())
