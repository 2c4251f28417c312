"""Models that are loaded: what each is made of, what lists say of them, and switching them by hand."""
