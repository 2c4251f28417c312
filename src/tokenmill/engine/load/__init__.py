"""A model where it runs: read from its files, placed in memory, changed and put to sleep in place."""
