"""Where K/V lives: block accounting and the prefix cache (torch-free), and the pool of pages (tensors)."""
