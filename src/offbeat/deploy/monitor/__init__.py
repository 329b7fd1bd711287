"""What can be seen of a deployed run: events, status, metrics and the live page."""
