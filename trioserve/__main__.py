"""``python -m trioserve``."""

from trioserve.cli import run

if __name__ == "__main__":
    run()
