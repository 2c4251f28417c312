"""The HTTP server: OpenAI's API over engines in processes of their own. Only this package knows HTTP."""
