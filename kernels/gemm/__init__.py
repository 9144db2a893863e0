"""Matrix products: dense, grouped, and for few rows."""
