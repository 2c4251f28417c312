"""Adapters (LoRA): reading them, where they go in a model, and what of them lies on a device."""
