"""What plugins of the kind `draft` share."""
