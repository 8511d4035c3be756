"""Training on episodes of a `verifiers` environment: played beside the trainer, on the run's own engines, by several turns each.

    run.py        rank 0: episodes in the place of samples; what a step took of them
    delivered.py  rank 0 of a run whose steps are filled from another run's episodes
    passing.py    what both say to the daemon as any other run does
    pool.py       environment workers' processes: who plays what, and what becomes of an episode whose worker is lost
    remote.py     rank 0's socket to environment workers in jobs of their own
    remote_worker.py  such a job's process: a worker's process, its gateway, and the socket
    worker.py     such a process: the package `verifiers`, which nothing else imports
    relay.py      in it: agents' calls on their way to the gateway, each with its episode's key and its name
    tools.py      in it: agents' calls of tools, recorded where their effects are outside
    builtin.py    environments that need no package
    boxed.py      in it: plain processes in sandboxes (`trainer.sandbox`)
    naming.py     names of calls, and what a call is when the environment answered otherwise; pure
    branches.py   from a played episode's graph to rows to train; pure
    wire.py       what rank 0 and a worker say to each other
    gateway.py    the run's gateway: one that is there, or one of the job's own
    stub.py       a model that is none, for a check
    opening.py    from a configuration to all of these

Read run.py first. Knows nothing of models and ranks.
"""
