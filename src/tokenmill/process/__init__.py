"""Processes that may die: what a child does for its parent, and the one client of sandboxed helpers."""
