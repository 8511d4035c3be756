"""Disaggregated: reserved GPUs only train, harvested engines only generate, each with an even share of the samples."""

from __future__ import annotations

from scavenger.simulate.contender import Contender
from scavenger.simulate.policies.even import Even

DISAGGREGATED = Contender("disaggregated", Even, harvest=True, reserved=False)
