"""Whole engines: built from options, kept in a loop, several at once, and replaced after a death."""
