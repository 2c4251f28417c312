"""vLLM's endpoints that load and unload adapters."""
