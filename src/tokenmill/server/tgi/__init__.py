"""Text Generation Inference's API, and vLLM's first one, over the same service. Must not know: engines."""
