"""What executors with several ranks share."""
