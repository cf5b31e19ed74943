"""One file per verb of the command line; ``tinyvae.cli`` imports the one that is called."""
