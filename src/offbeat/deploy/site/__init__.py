"""One site: its data, model and memory, and the process that holds them."""
