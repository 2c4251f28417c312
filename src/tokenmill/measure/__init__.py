"""Measuring: workloads, runs, and how far a run is from what the hardware could do."""
