"""Ollama's API over the same service. Must not know: engines."""
