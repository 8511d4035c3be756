"""What a site's idle GPUs would give, from its accounting. Read `survey.py` first."""
