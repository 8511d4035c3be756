"""Tools with effects outside: asked once in an episode, and answered from the ledger whenever it is played again. Pure.

    AskTool     -> durable, then `new`: the caller asks the tool, this once
                   again by the same life of a worker: `new` still, since its reply may have been lost
                   by another life: `answered` with what is recorded, or `open`: whether it was asked, nobody can know
    AnswerTool  -> durable, then `answered` with the first answer that came, whatever this one is

Boundary: of a gateway's calls, those of tools; `turns` has the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

from scavenger.ledger import records as rec
from scavenger.protocol.messages import AnswerTool, AskTool, Denied, ReplyBody, ToolState
from scavenger.router.core.state import ActiveRun, Episode, ToolCall
from scavenger.router.core.tables import Core
from scavenger.router.core.transitions import ToolStatus, ToolStep

MAX_EPISODE_CALLS = 4096
#: Calls of an episode without an answer. Each may bring an answer of the most bytes, and a tool that was asked is never refused its answer:
#: an episode holds `MAX_EPISODE_ANSWER_BYTES` and as many answers at most.
MAX_UNANSWERED_CALLS = 64
#: Bytes of answers of a run that are kept in memory: beyond, no further tool is asked until episodes end. One episode has a share of them,
#: so that one whose tools say too much stops alone.
MAX_ANSWER_BYTES, MAX_EPISODE_ANSWER_BYTES = 256 << 20, 32 << 20


def asked(core: Core, run: ActiveRun, episode: Episode, body: AskTool) -> ReplyBody:
    """An agent is about to ask a tool."""
    call = episode.tools.get(body.call)
    if call is None:
        if len(episode.tools) >= MAX_EPISODE_CALLS:
            why = f"episode {episode.name!r} has asked {MAX_EPISODE_CALLS:,} tools"
            return Denied("full", why, "begin another one")
        if sum(one.status is ToolStatus.ASKED for one in episode.tools.values()) >= MAX_UNANSWERED_CALLS:
            why = f"{MAX_UNANSWERED_CALLS} calls of episode {episode.name!r} have no answer yet"
            return Denied("full", why, "ask again when one has")
        if _answer_bytes(episode) >= MAX_EPISODE_ANSWER_BYTES:
            why = f"over {MAX_EPISODE_ANSWER_BYTES >> 20} MiB of answers of episode {episode.name!r} are kept"
            return Denied("full", why, "begin another one")
        if run.turns.answer_bytes >= MAX_ANSWER_BYTES:
            why = f"over {MAX_ANSWER_BYTES >> 20} MiB of tools' answers are kept"
            return Denied("full", why, "end the episodes that are over")
        call = episode.tools[body.call] = ToolCall(core.next_tool_call_id, body.tool, body.asker)
        core.next_tool_call_id += 1
        call.transition(ToolStep.ASK)
        core.record(rec.ToolAsked(call.id, episode.id, run.id, body.call, body.tool, body.asker, core.now))
        return ToolState("new")
    if call.status is ToolStatus.ANSWERED:
        core.count("tools_answered_again")
        return ToolState("answered", call.answer)
    if call.asker == body.asker:
        return ToolState("new")
    if not call.in_doubt:
        call.in_doubt = True
        core.event(
            "tool_call_in_doubt",
            run.id,
            f"episode {episode.name}",
            f"{call.tool} was asked by a worker that is gone, and no answer is known: it is not asked again",
        )
    return ToolState("open")


def answered(core: Core, run: ActiveRun, episode: Episode, body: AnswerTool) -> ReplyBody:
    """A tool answered, for the first time or again."""
    call = episode.tools.get(body.call)
    if call is None:
        return Denied("invalid", f"call {body.call!r} of a tool was never asked", "ask it first (AskTool)")
    if call.status is ToolStatus.ASKED:
        call.transition(ToolStep.ANSWER)
        call.answer = body.answer
        run.turns.answer_bytes += len(body.answer)
        core.record(rec.ToolAnswered(call.id, body.answer, core.now))
    elif call.answer != body.answer:
        core.event(
            "tool_answer_differs",
            run.id,
            f"episode {episode.name}",
            f"{call.tool} answered otherwise than is recorded: the recorded answer stays",
        )
    return ToolState("answered", call.answer)


def _answer_bytes(episode: Episode) -> int:
    return sum(len(call.answer) for call in episode.tools.values())


def forget(run: ActiveRun, episode: Episode) -> None:
    """The episode is over: the ledger has its calls."""
    run.turns.answer_bytes -= sum(len(call.answer) for call in episode.tools.values())
    episode.tools.clear()


def restore(runs: Mapping[int, ActiveRun], episodes: Mapping[int, Episode], snapshot: rec.Snapshot) -> None:
    """What the ledger has of open episodes, by their ids."""
    owners = {state.episode_id: state.run_id for state in snapshot.episodes}
    for state in snapshot.tool_calls:
        episode = episodes.get(state.episode_id)
        if episode is None:
            continue
        call = episode.tools[state.call] = ToolCall(state.call_id, state.tool, state.asker)
        call.transition(ToolStep.ASK)
        if state.answer is not None:
            call.transition(ToolStep.ANSWER)
            call.answer = state.answer
            runs[owners[state.episode_id]].turns.answer_bytes += len(state.answer)
