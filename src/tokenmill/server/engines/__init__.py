"""Engines behind the server: each engine's loop, the link to it, and a fleet that survives their deaths."""
