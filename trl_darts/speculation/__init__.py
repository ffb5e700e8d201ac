"""
Drafts from other answers to the same prompt ([DAS](https://huggingface.co/papers/2511.13841)), in vLLM's process.

vLLM verifies what is drafted: whatever happens here, answers are the model's own. Nothing here imports vLLM before
vLLM does.
"""
