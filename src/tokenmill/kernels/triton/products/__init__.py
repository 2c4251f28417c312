"""Products with weights of 16 and 32 bits, what adapters add to them, and which kernel serves which shape."""
