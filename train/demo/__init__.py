"""The demo model family of tokenmill: data generator, tokenizer, trainer and evaluation."""
