"""The vocabulary of tokenmill: plain records and protocols. No torch, no I/O, imports nothing above it."""
