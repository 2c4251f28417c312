"""Anthropic's Messages API over the same service. Must not know: engines."""
