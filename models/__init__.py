"""Tiny trained multimodal checkpoints, the pictures they know, and how they were made."""
