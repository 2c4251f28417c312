"""KServe's open inference protocol, version 2, over the same service. Must not know: engines."""
