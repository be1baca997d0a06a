"""`python -m meanfield` is the command `meanfield`."""

from meanfield.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
