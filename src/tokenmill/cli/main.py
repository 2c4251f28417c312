"""The command `tokenmill`. Owns: its entry, which imports next to nothing: whoever presses Ctrl-C while the verbs are
imported or their flags are made sees no traceback."""

from __future__ import annotations


def main() -> None:
    """Run the command line, and end the process."""
    try:
        from tokenmill.cli.verbs import run_verb  # a quarter of a second

        run_verb()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
