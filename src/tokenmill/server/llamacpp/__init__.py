"""llama.cpp's own API over the same service: completions, infill, and its endpoints that describe a server."""
