"""Relevance and labels: /rerank, /score and /classify over the same service. Must not know: engines."""
