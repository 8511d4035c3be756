"""How the daemon, its workers and its trainers talk: messages, CURVE keys, and each side's part of the conversation.

    messages     every message, its bounds and its encoding
    keys         CURVE keys and the rendezvous file
    heartbeat    the trainer's pings, from a thread (`scavenger/client.py` has the rest of the trainer's side)
    worker       the worker's side, a sans-IO state machine
    train_step   the state machine of one training step, which the trainer and the simulator drive

Must not know router, trainer or engine. Read `messages/__init__.py` first.
"""
