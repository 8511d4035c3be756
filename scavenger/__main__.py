"""`python -m scavenger` is the `scavenger` command."""

from scavenger.cli.main import main

if __name__ == "__main__":
    main()
