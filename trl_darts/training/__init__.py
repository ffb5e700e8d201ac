"""What surrounds TRL's training step: rows, rewards, padding, and how a run stops and resumes."""
