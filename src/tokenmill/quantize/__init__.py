"""Making quantised models: methods (statistics, weight) -> codes, the stream over layers, and what files hold."""
