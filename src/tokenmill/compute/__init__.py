"""What all code that computes with tensors agrees on: operations, descriptors, protocols. Loads no torch."""
