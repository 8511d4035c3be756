"""Disaggregated: reserved GPUs only train, harvested engines only generate, each with an even share of the samples."""

from __future__ import annotations

from scavenger.simulate.policies.even import Even
from scavenger.simulate.policy import SimulatedPolicy

DISAGGREGATED = SimulatedPolicy("disaggregated", Even, harvest=True, reserved=False)
