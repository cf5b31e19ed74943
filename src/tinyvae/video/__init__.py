"""Video files: open them safely, read exact frames, write files that every player shows correctly."""
