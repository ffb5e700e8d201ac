"""What tests and benchmarks share: models that are made on the spot, and real vLLM servers of them."""
