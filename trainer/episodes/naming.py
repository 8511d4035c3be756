"""Names of an episode's model calls, by which the ledger answers them again, and what a call is that was recorded with another content.
Pure.

A call is named by its agent and its number, `AGENT.NUMBER`: both count from 0, in the order in which the environment begins and asks. An
episode that is played again asks the same under the same names, and is answered what was generated then. A name that was given to another
content says that the environment answered otherwise than it did. On a branch, `AGENT.NUMBER~BRANCH`, the agent goes on from there; all of
its later calls are the branch's. So a third life finds the branch of the second one, and no list of branches is kept anywhere.

    name is new or known    -> answered, generated or from the ledger
    name is another call's  -> conflict(): Branch to the next one, or End of this episode

Calls of tools with effects outside have names too, `AGENT.DIGEST.NUMBER`: of what is asked, and how often the agent had it answered
before. So the same is found again whichever of several came first, and a harness that repeats a call which it lost repeats its name.

Boundary: the rule alone, apart from HTTP, so that each case is tested.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

#: Branches of one agent; an environment that never says the same twice would make one at each loss of its worker.
MOST_BRANCHES = 16
Setting = Literal["branch", "restart", "fail"]


@dataclass(frozen=True, slots=True)
class Branch:
    """Ask again under the next branch's name."""

    reason: str


@dataclass(frozen=True, slots=True)
class End:
    """The episode is over. `again`: it is to be played anew under another name; else it failed. `gone`: the ledger has ended it. `final`:
    not even as another try.
    """

    again: bool
    reason: str
    gone: bool = False
    final: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one agent."""

    agent: int
    number: int
    branch: int = 0

    @property
    def name(self) -> str:
        return f"{self.agent}.{self.number}" + (f"~{self.branch}" if self.branch else "")


@dataclass(slots=True)
class ToolCalls:
    """The calls of tools of one episode. `shown`: by agent and digest, the numbers whose answers agents have; `held`: under way."""

    shown: dict[tuple[int, str], set[int]] = field(default_factory=dict)
    held: dict[tuple[int, str], set[int]] = field(default_factory=dict)

    def take(self, agent: int, digest: str) -> int:
        """The number of a call that an agent makes: the first that it has no answer of and that is not under way."""
        shown, held = (numbers.setdefault((agent, digest), set()) for numbers in (self.shown, self.held))
        number = next(n for n in itertools.count() if n not in shown and n not in held)
        held.add(number)
        return number

    def give_back(self, agent: int, digest: str, number: int, *, shown: bool) -> None:
        """The call is over. Not `shown`: the agent hung up without its answer, and may ask the same again."""
        self.held[agent, digest].discard(number)
        if shown:
            self.shown[agent, digest].add(number)


@dataclass(slots=True)
class Calls:
    """The calls of one episode as they are asked. `taken`: those that were answered, by agent and number."""

    numbers: dict[int, int] = field(default_factory=dict)
    branches: dict[int, int] = field(default_factory=dict)
    taken: dict[tuple[int, int], Call] = field(default_factory=dict)

    def next(self, agent: int) -> Call:
        """The agent's next call."""
        number = self.numbers.get(agent, 0)
        self.numbers[agent] = number + 1
        return Call(agent, number, self.branches.get(agent, 0))

    def answered(self, call: Call) -> None:
        self.taken[call.agent, call.number] = call

    def conflict(self, call: Call, setting: Setting) -> Branch | End:
        """The call's name is that of another content. On a branch, `call` is to be asked again as `branched` says."""
        where = f"the environment answered otherwise than before at call {call.agent}.{call.number}"
        if setting == "restart":
            return End(True, f"{where}: begun anew")
        if setting == "fail":
            return End(False, where)
        if call.branch + 1 >= MOST_BRANCHES:
            return End(False, f"{where}, for the {MOST_BRANCHES}th time")
        return Branch(f"{where}: branch {call.branch + 1}")

    def branched(self, call: Call) -> Call:
        """The same call on the agent's next branch, where all of its later ones are too."""
        branch = max(call.branch + 1, self.branches.get(call.agent, 0))
        self.branches[call.agent] = branch
        return Call(call.agent, call.number, branch)
