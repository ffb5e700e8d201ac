"""What a run writes and reads back: metrics, traces, its log, progress."""
