"""Loaded models: what each is made of, how lists show them, and loading and unloading them by hand."""
