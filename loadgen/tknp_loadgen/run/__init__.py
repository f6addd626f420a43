"""Running a trace: one supervisor, and workers that each send a slice of one schedule."""
