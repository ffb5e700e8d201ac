"""
What the trainer does while candidates still decode: their log-probs, and the rewards of complete groups.

Nothing is imported here: the worker processes of reward functions need one module of it, and neither torch nor TRL.
"""
