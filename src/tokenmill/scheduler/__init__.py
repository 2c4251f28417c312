"""Who computes how many tokens in the next step. Integers only; knows nothing of tensors, text or time limits."""
