"""llama.cpp's own API over the same service: completions, infill, and what its clients ask about a server."""
