"""`python -m cannikin` is the `cannikin` command."""

from cannikin.cli import main

if __name__ == "__main__":
    main(prog_name="cannikin")
