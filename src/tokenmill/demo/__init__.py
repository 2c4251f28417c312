"""The embedded demo model's files. Owns: where they are. No torch."""

from tokenmill.demo.files import demo_dir

__all__ = ["demo_dir"]
