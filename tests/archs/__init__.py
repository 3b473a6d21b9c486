"""Tiny models of mlx-lm's architectures, and what compressed caches do in each."""
