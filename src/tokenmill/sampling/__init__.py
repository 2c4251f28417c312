"""From logits to tokens: stateless noise, edits, filters, logprobs, acceptance of drafts. Knows no models or plans."""
