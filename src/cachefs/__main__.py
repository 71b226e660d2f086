"""`python -m cachefs` is the `cachefs` command."""

from cachefs.cli import main

if __name__ == "__main__":
    main()
