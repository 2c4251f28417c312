"""What becomes of every name that a client may send: done, refused by name, harmless, or told as ignored."""
