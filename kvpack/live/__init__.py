"""What a cache is while it runs: where its rows lie, and what appending, rewinding and restoring do to them."""
