"""OpenAI's Responses API over the same service. Must not know: engines."""
