"""Small trained models: their language, their training, and their files."""
