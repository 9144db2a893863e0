"""The skeleton, style, script and icon of a page. Read as text, never imported."""
