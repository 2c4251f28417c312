"""Fakes with exact answers, shipped so that plug-ins can test against them too. No torch."""
