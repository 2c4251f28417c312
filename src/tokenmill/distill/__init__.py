"""Making drafters for a model: its own states teach them. What is written loads by --speculative-config."""
