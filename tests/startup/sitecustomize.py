"""
Read by every Python process that a test starts, because `tests/conftest.py` puts this folder on their path. Importing
torch and vLLM makes a million objects, and with Python's defaults a fifth of that time goes to the garbage collector.
"""

import gc


gc.set_threshold(100_000, 20, 20)
