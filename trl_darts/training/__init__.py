"""Rows, rewards and padding of TRL's training step, and stopping and resuming of a run."""
