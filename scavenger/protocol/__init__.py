"""How the daemon, its workers and its trainers talk: messages, CURVE keys, connections.

`messages` is the vocabulary with its codec and bounds; `keys` the CURVE keys and the rendezvous file; `connection` and
`heartbeat` a client's socket; `worker` the worker's side of the conversation as a sans-IO state machine; `train_step` the
state machine of one training step, which the trainer and the simulator drive. Knows no router, no trainer and no engine.
Read `messages/__init__.py` first.
"""
