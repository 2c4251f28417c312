"""What a sequence may say: constraints behind the Constraint seam, compiled from `structured_outputs`."""
