"""The worker's side of the conversation with the daemon: a sans-IO state machine.

Events in, actions out; `rollout.worker` performs the actions on a real socket and a real engine. Owns which leases the worker
holds and what of their tokens is durable. Must not know a socket, a clock or an engine.
Read `session.py` first; `events.py` has its vocabulary.
"""
