"""``python -m tinyvae.cli VERB ...``: the same as ``python -m tinyvae VERB ...``, for older scripts."""

from tinyvae.cli.main import main

if __name__ == "__main__":  # processes that are spawned import this module too
    main()
