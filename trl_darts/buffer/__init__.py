"""Prompts that outlive a step: between the data loader and the optimizer."""
