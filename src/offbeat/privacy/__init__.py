"""What a server may see: clipped, noised, counted, and summed in secret."""
