"""Attention over paged keys: one new token per sequence, many, shared prefixes, latent keys, and what comes before."""
