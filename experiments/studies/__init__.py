"""The papers whose tables and figures are run again, one module each."""
