"""Messages between the server and its sites: what they say, how they are encoded, and what carries them."""
