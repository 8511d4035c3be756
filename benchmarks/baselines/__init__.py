"""The systems that we compare ourselves with, as policies of the simulator, and their published points. Never installed."""
