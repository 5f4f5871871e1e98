"""What the ops share."""
