"""Chat completions with `store: true`, and what can be asked of them later. Must not know: engines."""
