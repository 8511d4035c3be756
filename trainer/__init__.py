"""The MPI training job. `python -m trainer run.toml` is one rank; `python -m trainer.launch` starts them all.

`loop` runs the steps, `algorithms` and `model` compute, `data` and `checkpoint` read and write, `prepare` checks a run before it is
submitted. Must not know Slurm's queue or other runs; it knows engines only in `local` mode. Read `loop/run.py` first, then `loop/step.py`.
"""
