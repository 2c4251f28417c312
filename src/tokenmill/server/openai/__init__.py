"""OpenAI's API: request schemas, and handlers that turn requests into token streams and back into its shapes."""
