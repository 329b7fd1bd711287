"""Reports of runs as one HTML page: learning curves, costs, staleness, privacy and metrics by client."""
