"""`python -m warpline`, and the entry point of the command `warpline`."""

from warpline.cli import interrupt


def main() -> None:
    """Handle Ctrl-C before the slow imports, then run the command line."""
    try:
        interrupt.watch()
        from warpline.cli.main import main as run

        run()
    except KeyboardInterrupt:
        interrupt.end()


if __name__ == "__main__":
    main()
