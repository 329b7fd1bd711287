"""The server of a deployed run: who is connected, what is in flight, what is accepted, and the run itself."""
