"""python -m polymix.cli: the console script."""

from polymix.cli import main

if __name__ == "__main__":
    main()
