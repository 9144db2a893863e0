"""The small trained models: their language, how they were trained, and their files."""
