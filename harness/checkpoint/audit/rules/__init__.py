"""Define the rules of the audit, and the findings that name them."""
