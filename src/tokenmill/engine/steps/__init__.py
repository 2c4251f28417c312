"""One engine: what may enter it, its steps, the processes that run them, and who hears of the tokens."""
