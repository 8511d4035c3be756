"""A box for processes that a model directs: bubblewrap, with no network and limits that end the box and nothing else.

    plan.py      from limits and paths to bubblewrap's arguments; pure
    filter.py    the system calls that a box refuses, as a seccomp program; pure
    inside.py    process 1 of a box: starts what it is told to, and watches the limits; standard library only
    box.py       a box as its owner sees it: run, read, write, reach ports

Read box.py first. Knows nothing of episodes, models or `verifiers`.
"""
