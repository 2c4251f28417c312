"""Products with packed weights of 8 and 4 bits."""
