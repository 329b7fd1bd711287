"""Parts of benchmarks/deployed.py."""
