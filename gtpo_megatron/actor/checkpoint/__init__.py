"""What a rank saves and restores."""
