"""`python -m scavenger` is the `scavenger` command."""

from scavenger.cli import main

if __name__ == "__main__":
    main()
