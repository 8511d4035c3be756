"""What may become of a sample, of a worker and of a worker's GPU memory: states, steps, and one table of legal transitions each.

All state machines of the router are here, and nothing else:

    sample   SampleStatus -> SampleStep -> SampleStatus    in SAMPLE_TRANSITIONS; beside it `Sample.give_up` marks one that ended without
                                                           a completion
    worker   WorkerStatus -> WorkerStep -> WorkerStatus    in WORKER_TRANSITIONS
    memory   Memory -> MemoryStep -> Memory                in MEMORY_TRANSITIONS, of reserved workers, beside their status
    episode  EpisodeStatus -> EpisodeStep -> EpisodeStatus in EPISODE_TRANSITIONS
    tool     ToolStatus -> ToolStep -> ToolStatus          in TOOL_TRANSITIONS, of a call of a tool with effects outside
    delivery DeliveryStatus -> DeliveryStep -> DeliveryStatus in DELIVERY_TRANSITIONS, of an episode's turns to another run's trainer

A worker's status and its memory move together: MEMORY_ALLOWED says how, and `audit` checks it after every event of a test.

`Sample.transition`, `Worker.transition`, `Worker.transition_memory`, `Episode.transition`, `ToolCall.transition` and
`Delivery.transition` (`state`) look a step up and raise `IllegalTransition`, changing nothing, where the table has none. Pure.
"""

from __future__ import annotations

from enum import StrEnum


class IllegalTransition(Exception):
    """A bug: the core tried a step that no table holds. Names the sample or worker, its state and the step, and leaves its state.

    What the event did before is not undone: discard this core.
    """


class SampleStatus(StrEnum):
    NEW = "new"  # made, or read from the ledger, within this event
    QUEUED = "queued"  # waits for a worker
    LEASED = "leased"  # a worker generates it
    UNCONFIRMED = "unconfirmed"  # leased before the daemon restarted; its worker has not come back yet
    COMPLETE = "complete"  # last token accepted
    ENDED = "ended"  # consumed, filtered, masked, evaluated, served, superseded, poisoned or surplus


class SampleStep(StrEnum):
    """What happens to a sample. The `RESTORE_` ones put it where the ledger's row says that it was."""

    QUEUE = "queue"
    LEASE = "lease"  # a worker is to generate it
    RELEASE = "release"  # its lease is over, it is not: it waits for another worker
    CONFIRM = "confirm"  # its worker came back with the lease
    FINISH = "finish"
    END = "end"  # a complete sample was used up: consumed, filtered, masked, evaluated, served or surplus
    REOPEN = "reopen"  # a later attempt takes its group over: it is complete again
    ABANDON = "abandon"  # given up before its use: superseded or poisoned
    RESTORE_LEASED = "restore-leased"
    RESTORE_COMPLETE = "restore-complete"
    RESTORE_ENDED = "restore-ended"


#: What may happen to a sample: state -> step -> state. Anything else is a bug.
SAMPLE_TRANSITIONS: dict[SampleStatus, dict[SampleStep, SampleStatus]] = {
    SampleStatus.NEW: {
        SampleStep.QUEUE: SampleStatus.QUEUED,
        SampleStep.RESTORE_LEASED: SampleStatus.UNCONFIRMED,
        SampleStep.RESTORE_COMPLETE: SampleStatus.COMPLETE,
        SampleStep.RESTORE_ENDED: SampleStatus.ENDED,
    },
    SampleStatus.QUEUED: {SampleStep.LEASE: SampleStatus.LEASED, SampleStep.ABANDON: SampleStatus.ENDED},
    SampleStatus.LEASED: {
        SampleStep.RELEASE: SampleStatus.QUEUED,
        SampleStep.FINISH: SampleStatus.COMPLETE,
        SampleStep.ABANDON: SampleStatus.ENDED,
    },
    SampleStatus.UNCONFIRMED: {
        SampleStep.CONFIRM: SampleStatus.LEASED,
        SampleStep.RELEASE: SampleStatus.QUEUED,
        SampleStep.ABANDON: SampleStatus.ENDED,
    },
    SampleStatus.COMPLETE: {SampleStep.END: SampleStatus.ENDED, SampleStep.ABANDON: SampleStatus.ENDED},
    SampleStatus.ENDED: {SampleStep.REOPEN: SampleStatus.COMPLETE},
}
#: Still to be generated. (NEW exists within one event only.)
UNFINISHED = frozenset({SampleStatus.QUEUED, SampleStatus.LEASED, SampleStatus.UNCONFIRMED})


class WorkerStatus(StrEnum):
    NEW = "new"  # made within this event
    LOADING = "loading"  # connected, without the version that its run needs
    READY = "ready"
    FALLING_ASLEEP = "falling-asleep"  # asked to sleep, has not answered
    ASLEEP = "asleep"
    DRAINING = "draining"  # asked to leave
    HANDING_OVER = "handing-over"  # asked to leave this run, and to register for another one
    AWAY = "away"  # restored from the ledger, has not come back yet
    GONE = "gone"  # dead or left: in no table any more


class WorkerStep(StrEnum):
    """What happens to a worker."""

    JOIN = "join"  # it registered
    RESTORE = "restore"  # the ledger has it, from before the daemon restarted
    RETURN = "return"  # and it registered again
    LOAD = "load"  # it needs another version than it has
    SERVE = "serve"  # it has the version that its run needs
    SLEEP = "sleep"
    SLEPT = "slept"
    FOUND_FALLING_ASLEEP = "found-falling-asleep"  # by its own word: it was ordered to by an earlier daemon
    FOUND_ASLEEP = "found-asleep"
    WAKE = "wake"
    DRAIN = "drain"
    HAND_OVER = "hand-over"
    LEAVE = "leave"


#: What may happen to a worker: state -> step -> state. Anything else is a bug. What is asked to leave does nothing else. One that
#: hands over leaves as if it drained; what registers for the other run is a new worker, of the same process.
WORKER_TRANSITIONS: dict[WorkerStatus, dict[WorkerStep, WorkerStatus]] = {
    WorkerStatus.NEW: {WorkerStep.JOIN: WorkerStatus.LOADING, WorkerStep.RESTORE: WorkerStatus.AWAY},
    WorkerStatus.AWAY: {
        WorkerStep.RETURN: WorkerStatus.LOADING,
        WorkerStep.DRAIN: WorkerStatus.DRAINING,
        WorkerStep.LEAVE: WorkerStatus.GONE,
    },
    WorkerStatus.LOADING: {
        WorkerStep.SERVE: WorkerStatus.READY,
        WorkerStep.SLEEP: WorkerStatus.FALLING_ASLEEP,
        WorkerStep.FOUND_FALLING_ASLEEP: WorkerStatus.FALLING_ASLEEP,
        WorkerStep.FOUND_ASLEEP: WorkerStatus.ASLEEP,
        WorkerStep.HAND_OVER: WorkerStatus.HANDING_OVER,
        WorkerStep.DRAIN: WorkerStatus.DRAINING,
        WorkerStep.LEAVE: WorkerStatus.GONE,
    },
    WorkerStatus.READY: {
        WorkerStep.LOAD: WorkerStatus.LOADING,
        WorkerStep.SLEEP: WorkerStatus.FALLING_ASLEEP,
        WorkerStep.HAND_OVER: WorkerStatus.HANDING_OVER,
        WorkerStep.DRAIN: WorkerStatus.DRAINING,
        WorkerStep.LEAVE: WorkerStatus.GONE,
    },
    WorkerStatus.FALLING_ASLEEP: {
        WorkerStep.SLEPT: WorkerStatus.ASLEEP,
        WorkerStep.DRAIN: WorkerStatus.DRAINING,
        WorkerStep.LEAVE: WorkerStatus.GONE,
    },
    WorkerStatus.ASLEEP: {
        WorkerStep.WAKE: WorkerStatus.LOADING,
        WorkerStep.DRAIN: WorkerStatus.DRAINING,
        WorkerStep.LEAVE: WorkerStatus.GONE,
    },
    WorkerStatus.HANDING_OVER: {WorkerStep.DRAIN: WorkerStatus.DRAINING, WorkerStep.LEAVE: WorkerStatus.GONE},
    WorkerStatus.DRAINING: {WorkerStep.LEAVE: WorkerStatus.GONE},
    WorkerStatus.GONE: {},
}
#: Asked to leave its run: it gets no more leases, and that it goes is no preemption.
LEAVING = frozenset({WorkerStatus.DRAINING, WorkerStatus.HANDING_OVER})


class GpuMemoryState(StrEnum):
    """What a worker does with its GPU's memory. Beside its status: one that is asked to leave, or is silent, holds it as before."""

    AWAKE = "awake"
    FALLING_ASLEEP = "falling-asleep"  # told to sleep, has not acknowledged that its memory is free
    ASLEEP = "asleep"  # it acknowledged
    WAKING = "waking"  # told to wake, has not acknowledged that it has its memory again


class MemoryStep(StrEnum):
    """Orders to a worker, what it acknowledges, and what a registration says that an earlier daemon had ordered."""

    SLEEP = "sleep"
    SLEPT = "slept"
    WAKE = "wake"
    WOKEN = "woken"
    FOUND_FALLING_ASLEEP = "found-falling-asleep"
    FOUND_ASLEEP = "found-asleep"
    FOUND_WAKING = "found-waking"


#: What may happen to a worker's memory: state -> step -> state. Anything else is a bug. Only one that is asleep is woken, so that an order
#: to wake never overtakes the acknowledgement of the order before.
MEMORY_TRANSITIONS: dict[GpuMemoryState, dict[MemoryStep, GpuMemoryState]] = {
    GpuMemoryState.AWAKE: {
        MemoryStep.SLEEP: GpuMemoryState.FALLING_ASLEEP,
        MemoryStep.FOUND_FALLING_ASLEEP: GpuMemoryState.FALLING_ASLEEP,
        MemoryStep.FOUND_ASLEEP: GpuMemoryState.ASLEEP,
        MemoryStep.FOUND_WAKING: GpuMemoryState.WAKING,
    },
    GpuMemoryState.WAKING: {
        MemoryStep.SLEEP: GpuMemoryState.FALLING_ASLEEP,
        MemoryStep.WOKEN: GpuMemoryState.AWAKE,
    },
    GpuMemoryState.FALLING_ASLEEP: {MemoryStep.SLEPT: GpuMemoryState.ASLEEP},
    GpuMemoryState.ASLEEP: {MemoryStep.WAKE: GpuMemoryState.WAKING},
}
#: What a worker's memory may be in each status. What is asked to leave, or has not come back, keeps its memory as it was.
MEMORY_ALLOWED: dict[WorkerStatus, frozenset[GpuMemoryState]] = {
    WorkerStatus.LOADING: frozenset({GpuMemoryState.AWAKE, GpuMemoryState.WAKING}),
    WorkerStatus.READY: frozenset({GpuMemoryState.AWAKE, GpuMemoryState.WAKING}),
    WorkerStatus.FALLING_ASLEEP: frozenset({GpuMemoryState.FALLING_ASLEEP}),
    WorkerStatus.ASLEEP: frozenset({GpuMemoryState.ASLEEP}),
    WorkerStatus.DRAINING: frozenset(GpuMemoryState),
    WorkerStatus.HANDING_OVER: frozenset(GpuMemoryState),
    WorkerStatus.AWAY: frozenset(GpuMemoryState),
}
#: What a registration says, where this daemon has ordered nothing yet, and the step that it is; one that is awake is as it began.
MEMORY_FOUND: dict[GpuMemoryState, MemoryStep] = {
    GpuMemoryState.FALLING_ASLEEP: MemoryStep.FOUND_FALLING_ASLEEP,
    GpuMemoryState.ASLEEP: MemoryStep.FOUND_ASLEEP,
    GpuMemoryState.WAKING: MemoryStep.FOUND_WAKING,
}


class EpisodeStatus(StrEnum):
    NEW = "new"  # made, or read from the ledger, within this event
    OPEN = "open"  # it takes turns
    ENDED = "ended"  # it takes no more, and what it had is not in memory


class EpisodeStep(StrEnum):
    """What happens to an episode."""

    OPEN = "open"  # its first turn was asked for, or the ledger has it as open
    END = "end"
    RESTORE_ENDED = "restore-ended"


#: What may happen to an episode: state -> step -> state. Anything else is a bug. One that has ended is not opened again: its requests
#: would be generated a second time.
EPISODE_TRANSITIONS: dict[EpisodeStatus, dict[EpisodeStep, EpisodeStatus]] = {
    EpisodeStatus.NEW: {EpisodeStep.OPEN: EpisodeStatus.OPEN, EpisodeStep.RESTORE_ENDED: EpisodeStatus.ENDED},
    EpisodeStatus.OPEN: {EpisodeStep.END: EpisodeStatus.ENDED},
    EpisodeStatus.ENDED: {},
}


class ToolStatus(StrEnum):
    """A call of a tool with effects outside."""

    NEW = "new"
    ASKED = (
        "asked"  # by one life of an environment worker; whether it has been, nobody knows before it answers
    )
    ANSWERED = "answered"


class ToolStep(StrEnum):
    """What happens to such a call."""

    ASK = "ask"
    ANSWER = "answer"


#: What may happen to a tool's call. It is asked once, and its first answer stays.
TOOL_TRANSITIONS: dict[ToolStatus, dict[ToolStep, ToolStatus]] = {
    ToolStatus.NEW: {ToolStep.ASK: ToolStatus.ASKED},
    ToolStatus.ASKED: {ToolStep.ANSWER: ToolStatus.ANSWERED},
    ToolStatus.ANSWERED: {},
}


class DeliveryStatus(StrEnum):
    """What one policy said in one episode, on its way to that policy's trainer. The values are the ledger's."""

    NEW = "new"  # made, or read from the ledger, within this event
    DUE = "due"  # durable; its trainer has not taken a step with it
    TAKEN = "taken"  # a step took it: consumed, filtered or masked
    STALE = "stale"  # its weights were too old for every step to come
    DROPPED = "dropped"  # too many were due, or the run ended first
    SERVED = "served"  # the run takes no steps


class DeliveryStep(StrEnum):
    """What happens to a delivery. The `RESTORE_` one puts it where the ledger's row says that it was."""

    DELIVER = "deliver"
    SERVE = "serve"
    TAKE = "take"
    REOPEN = "reopen"  # a later attempt goes on from before the step that took it
    EXPIRE = "expire"
    DROP = "drop"
    RESTORE_TAKEN = "restore-taken"


#: What may happen to a delivery. One that is over is delivered no more, unless the step that took it is taken back.
DELIVERY_TRANSITIONS: dict[DeliveryStatus, dict[DeliveryStep, DeliveryStatus]] = {
    DeliveryStatus.NEW: {
        DeliveryStep.DELIVER: DeliveryStatus.DUE,
        DeliveryStep.SERVE: DeliveryStatus.SERVED,
        DeliveryStep.RESTORE_TAKEN: DeliveryStatus.TAKEN,
    },
    DeliveryStatus.DUE: {
        DeliveryStep.TAKE: DeliveryStatus.TAKEN,
        DeliveryStep.EXPIRE: DeliveryStatus.STALE,
        DeliveryStep.DROP: DeliveryStatus.DROPPED,
    },
    DeliveryStatus.TAKEN: {DeliveryStep.REOPEN: DeliveryStatus.DUE},
    DeliveryStatus.STALE: {},
    DeliveryStatus.DROPPED: {},
    DeliveryStatus.SERVED: {},
}
