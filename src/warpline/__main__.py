"""`python -m warpline`, and what the command `warpline` calls."""

from warpline.cli import interrupt


def main() -> None:
    """Listen for Ctrl-C before anything else, which takes a moment to import."""
    interrupt.watch()
    try:
        from warpline.cli.main import main as run

        run()
    except KeyboardInterrupt:
        interrupt.end()


if __name__ == "__main__":
    main()
