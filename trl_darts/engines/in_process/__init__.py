"""Engines in the trainer's own processes: transformers and colocated vLLM."""
