"""OpenAI's API: request schemas, and handlers that turn requests into token streams, and streams into answers."""
