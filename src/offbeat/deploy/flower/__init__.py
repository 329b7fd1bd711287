"""Flower as the transport: its apps, commands and processes."""
