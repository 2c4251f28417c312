"""Engines behind the server: a loop per engine, the link to it, and a fleet that survives their deaths."""
