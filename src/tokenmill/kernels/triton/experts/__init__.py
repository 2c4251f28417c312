"""Mixtures of experts: the choice of experts, sorting tokens by expert, and the experts' products."""
