"""``python -m tinyvae VERB ...``: the same as ``tinyvae VERB ...``."""

from tinyvae.cli.main import main

if __name__ == "__main__":  # processes that are spawned import this module too
    main()
