"""Adapters (LoRA): reading them, where they apply in a model, and their tensors on a device."""
