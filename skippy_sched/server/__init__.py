"""HTTP: wire formats, errors, metrics and the daemon's life; no scheduling decisions."""
