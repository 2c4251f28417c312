"""The WebSocket protocol (RFC 6455). Must not know: HTTP, any API."""
