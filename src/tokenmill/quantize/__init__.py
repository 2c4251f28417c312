"""Making quantised models: methods (statistics, weight) -> codes, going through the layers, and the forms of files."""
