"""What stands between a model, a data set and a submitted job: `draft` writes a run's files, `check` says what would stop it.

    model.py    what a model's folder says of itself          rows.py     which columns and files a data set has
    sizes.py    how large engines and micro-batches are (pure) draft.py   the text of run.toml and train.sbatch (pure)
    engines.py  what engines would refuse                     weights.py  what would keep weights from engines
    check.py    every check, in order                         smallest.py the smallest run, with its model
    __main__.py the commands, which `scavenger init` starts

How much memory a run takes: `scavenger.sizing`. Read `check.py` first. Must not start a job, nor know a daemon's state but whether its
files are there.
"""
