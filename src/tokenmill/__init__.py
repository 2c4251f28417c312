"""tokenmill: an LLM inference engine you can read."""

__version__ = "0.1.0"
