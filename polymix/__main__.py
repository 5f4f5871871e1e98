"""`python -m polymix`: the command line."""

from polymix.cli import main

if __name__ == "__main__":
    main()
