"""The device side of a step: rows (state), batch (one step's tensors), runner (forward, sampling, results)."""
