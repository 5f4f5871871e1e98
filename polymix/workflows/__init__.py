"""What `polymix` does from end to end, one folder a verb, and what their pages and pictures share."""
