"""The embedded demo model's files. Owns: where they are. No torch."""

from tokenmill.demo.files import check_part, demo_dir, demo_model

__all__ = ["check_part", "demo_dir", "demo_model"]
