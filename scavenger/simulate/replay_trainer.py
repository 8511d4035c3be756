"""The trainer of a replay: the simulator's, with the seconds that were measured of the one that lived. Pure.

Groups without anything to teach are scored and not trained, as they were. Owns nothing but these seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Set

from scavenger.simulate.contender import Contender
from scavenger.simulate.engine import Simulation
from scavenger.simulate.outcome import StepOutcome
from scavenger.simulate.replay_fit import Machines
from scavenger.simulate.scenario import Scenario
from scavenger.simulate.site_daemon import Daemon
from scavenger.simulate.site_trainer import SimTrainer, Under


class RecordedTrainer(SimTrainer):
    """`trained`: by step, the prompts that had something to teach."""

    def __init__(
        self,
        sim: Simulation,
        daemon: Daemon,
        scenario: Scenario,
        contender: Contender,
        published: Callable[[int], None],
        finished: Callable[[StepOutcome], None],
        machines: Machines,
        trained: Mapping[int, Set[int]],
    ) -> None:
        super().__init__(sim, daemon, scenario, contender, published, finished)
        self._machines, self._taught = machines, trained

    @property
    def wake_s(self) -> float:
        return 0.0

    def _to_training_s(self) -> float:
        return 0.0

    def _train_s(self, under: Under) -> float:
        """All groups that wait: rank 0 scores them one by one, and those that teach something are trained."""
        groups, under.ready = list(under.ready), deque()
        taught = self._taught[under.step]
        tokens = sum(
            self._scenario.prompt_tokens + length
            for group in groups
            if group.prompt_index in taught
            for length in self._lengths[group.group_id]
        )
        return self._machines.score_group_s * len(groups) + self._machines.train_token_s * tokens

    def _update_s(self) -> float:
        return self._machines.update_s

    def _publish_s(self) -> float:
        return self._machines.publish_s
