"""What a sequence may say: implementations of the Constraint protocol, compiled from `structured_outputs`."""
