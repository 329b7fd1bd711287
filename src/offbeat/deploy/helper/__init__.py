"""The second server of secure aggregation: its protocol, store, HTTPS server and client."""
