"""`python -m warpline`."""

from warpline.cli.main import main

if __name__ == "__main__":
    main()
