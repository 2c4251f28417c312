"""What options and generation_config.json say: read and checked before a model is looked for."""
