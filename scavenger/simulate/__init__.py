"""The simulator: virtual time, cost models, fleets and lengths that drive the same core as the live daemon. Imports no torch."""
