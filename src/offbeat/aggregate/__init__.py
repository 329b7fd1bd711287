"""From the uploads of a buffer to the one mean that a server half sees."""
