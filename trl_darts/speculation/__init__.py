"""
Drafts tokens from other answers to the same prompt ([DAS](https://huggingface.co/papers/2511.13841)), inside vLLM.

vLLM verifies every draft, so answers always follow the model's own distribution. Nothing here imports vLLM before vLLM
does.
"""
