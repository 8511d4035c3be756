"""How much memory a run takes, of GPUs and of hosts, in each of its phases; what fits, and what to set where it does not. Pure arithmetic.

    shape.py      a model's sizes, by its config.json
    training.py   a rank's share: states, gathered layers, activations, output head; the rule of `trainer.offload = "auto"`
    engine.py     an engine: weights, KV cache, batch; host memory and CPUs of its job; GPU types
    phases.py     what coexists: load, generate, forward, backward, optimizer, publish and the two toggles, of GPU and host
    fit.py        whether it fits, what to change, and the settings that fit

The one model of memory: `scavenger init` and its `--check`, the trainer's offload and the simulator ask it. Tests hold it to the account
of the GPU's memory while the trainer's own step runs (`tests/trainer/test_memory_model.py`). Knows no torch, no file and no clock.
Read `phases.py` first.
"""
