"""Chat completions with `store: true`, and the endpoints that read them later. Must not know: engines."""
