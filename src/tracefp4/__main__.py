"""Run the command line as `python -m tracefp4`."""

from tracefp4.cli.main import run

if __name__ == "__main__":
    run()
