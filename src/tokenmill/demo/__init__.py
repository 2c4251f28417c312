"""The embedded demo model's files. Owns: where they are. No torch."""

from tokenmill.demo.files import demo_dir, demo_model

__all__ = ["demo_dir", "demo_model"]
