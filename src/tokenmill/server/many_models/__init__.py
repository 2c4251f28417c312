"""Many models behind one address: which are configured, which are loaded, and which are unloaded when memory is
short."""
